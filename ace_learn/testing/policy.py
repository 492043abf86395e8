"""The laws of the exit rule for one policy, tried on made-up streams of tokens and signals."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.artifacts import JSON
from ace_learn.evaluate.replay import first_fire, held
from ace_learn.exit import ExitPolicy
from ace_learn.exit.policy import smooth
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows
from ace_learn.signals import BY_NAME, LEARNED, SIGNALS
from ace_learn.testing.law import RaisesNothing, holds, refuses, same
from ace_learn.thinking import BoundaryTables, ThinkMarkers

STREAMS = 6
"""Streams of tokens per check."""

_TEXTS = ["a", "\n", "\n\n", ".\n\n", "<t>", "</", "t>", "b"]
_START, _END = 4, (5, 6)
_BODY = (0, 0, 7, 7, 1, 2, 3)
_LONGEST = 10
"""A policy that thinks longer at least is tried with this minimum."""


def check_policy(policy: ExitPolicy, *, tracker: type[ExitTracker] = ExitTracker, seed: int = 0) -> None:
    """Checks that a policy, run by a tracker, keeps the laws of the exit rule (DESIGN, section 5).

    The laws: a decision depends on the token prefix alone, neither on the windows of a speculative decoder and what it
    rejects, nor on batch neighbours; replay decides as the tracker does; a stricter threshold, a longer patience or a
    longer minimum never exits earlier; patience and minimum are kept; only the first think block is exited; NaN never
    fires; JSON brings the policy back, and a certified one that was changed is refused.

    A minimum above 10 tokens, and a patience above 3, are tried at these values, so that streams stay short.

    Args:
        policy: The policy.
        tracker: What runs it: another implementation of `ExitTracker` to be checked.
        seed: Which streams.

    Raises:
        LawError: A law does not hold; names the law, the input and both values.
        ValueError: The policy reads derived signals, for which the streams hold no values.
    """
    derived = [name for name in policy.signals if name not in LEARNED]
    if derived:
        raise ValueError(
            f"check_policy draws streams of the learned signals {', '.join(LEARNED)}, and this policy reads "
            f"{', '.join(derived)} too; check it without them"
        )
    json_brings_it_back(policy)
    changes_break_the_seal(policy)
    nan_never_fires(policy)
    asked = replace(
        policy, min_thinking_tokens=min(policy.min_thinking_tokens, _LONGEST), patience=min(policy.patience, 3)
    )
    rng = random.Random(seed)
    streams = [make_stream(asked, rng) for _ in range(STREAMS)]
    with RaisesNothing("the rule runs on any stream", given=policy):
        walks = walk_streams(asked, streams, tracker)
        neighbours_do_not_matter(asked, streams[:2], walks, tracker)
        windows_do_not_matter(asked, streams[:3], walks, tracker, rng)
        replay_decides_alike(asked, streams, walks)
        only_the_first_block_is_exited(asked, streams, walks)
        limits_are_kept(asked, streams, tracker)
        a_stricter_policy_is_never_earlier(asked, streams, walks, tracker)


class Stream(NamedTuple):
    """What one request generates, one entry per token: ids, learned signals, log-probabilities."""

    tokens: list[int]
    signals: Float[Tensor, "T L"]
    logprobs: Float[Tensor, " T"]


class Walk(NamedTuple):
    """What the rule said after each token; a forced token is the one that must follow, -1 where none must."""

    forced: list[int]
    closed: list[bool]
    in_think: list[bool]
    thought: list[int]
    smoothed: Float[Tensor, "T S"]

    @property
    def exit(self) -> int:
        """Where the first token is forced; the length of the stream if nowhere."""
        return next((at for at, token in enumerate(self.forced) if token >= 0), len(self.forced))


def make_stream(policy: ExitPolicy, rng: random.Random) -> Stream:
    """Two think blocks in which the signals go, with noise, from what argues against an exit to what argues for it."""
    length = policy.min_thinking_tokens + 24
    first = rng.choices(_BODY, k=length)
    tokens = [_START, *first, *_END, 0, _START, *rng.choices(_BODY, k=8), *_END, 0]
    slope = rng.choice((1.2, 6.0))
    ramp = torch.tensor([min(1.0, slope * at / length) + rng.uniform(-0.1, 0.1) for at in range(len(tokens))])
    columns = [(1 - ramp) * 400 if falls else ramp for falls in (_against(policy, name) for name in LEARNED)]
    signals = torch.stack(columns, dim=-1).clamp_min(0)
    return Stream(tokens, signals, torch.tensor([-rng.random() for _ in tokens]))


def walk_streams(policy: ExitPolicy, streams: Sequence[Stream], tracker: type[ExitTracker]) -> list[Walk]:
    """Requests of equal length side by side, one token per step."""
    running = _start(policy, len(streams), tracker)
    slots = torch.arange(len(streams))
    steps = []
    for at in range(len(streams[0].tokens)):
        steps.append(running.observe(slots, _rows(streams, [stream.tokens[at : at + 1] for stream in streams], at)))
    return [
        Walk(
            forced=[int(step.forced[row, 0]) for step in steps],
            closed=[bool(step.closed[row, 0]) for step in steps],
            in_think=[bool(step.in_think[row, 0]) for step in steps],
            thought=[int(step.thought[row, 0]) for step in steps],
            smoothed=torch.stack([step.smoothed[row, 0] for step in steps]),
        )
        for row in range(len(streams))
    ]


def neighbours_do_not_matter(
    policy: ExitPolicy, streams: Sequence[Stream], walks: Sequence[Walk], tracker: type[ExitTracker]
) -> None:
    """A request gets alone the verdicts that it gets together with others.

    Raises:
        LawError: It does not.
    """
    law = "the rule does not depend on the other requests of a batch"
    for stream, together in zip(streams, walks, strict=False):
        (alone,) = walk_streams(policy, [stream], tracker)
        given = (policy, stream.tokens)
        same(law, together.forced, alone.forced, given=given)
        _same_numbers(law, together.smoothed, alone.smoothed, given=given)


def windows_do_not_matter(
    policy: ExitPolicy,
    streams: Sequence[Stream],
    walks: Sequence[Walk],
    tracker: type[ExitTracker],
    rng: random.Random,
) -> None:
    """Windows of any size, with rejected drafts behind them, give the verdicts of one token per step.

    Raises:
        LawError: They do not.
    """
    law = "the rule does not depend on how many tokens a step verifies"
    for stream, walk in zip(streams, walks, strict=False):
        running, at = _start(policy, 1, tracker), 0
        while at < len(stream.tokens):
            kept = stream.tokens[at : at + rng.randint(1, 5)]
            window = [*kept, *rng.choices(range(len(_TEXTS)), k=rng.randrange(3))]
            verdict = running.observe(torch.arange(1), _rows([stream], [window], at))
            given = (policy, stream.tokens[: at + len(kept)], f"the last {len(kept)} in a window of {len(window)}")
            stop = at + len(kept)
            same(law, verdict.forced[0, : len(kept)].tolist(), walk.forced[at:stop], given=given)
            _same_numbers(law, verdict.smoothed[0, : len(kept)], walk.smoothed[at:stop], given=given)
            at = stop


def replay_decides_alike(policy: ExitPolicy, streams: Sequence[Stream], walks: Sequence[Walk]) -> None:
    """Smoothing and deciding over whole arrays, as evaluations do, exits where the tracker does.

    Raises:
        LawError: It does not.
    """
    # Without smoothing, the smoothed signals are the signals themselves.
    plain = ExitPolicy(predicate="any", thresholds={LEARNED[0]: 0.5}, smooth_over="tokens")
    for stream, walk, raw in zip(streams, walks, walk_streams(plain, streams, ExitTracker), strict=True):
        thought = [at for at in range(_end_of_first_block(raw)) if raw.thought[at] > 0]
        boundaries = [at for at in thought if raw.closed[at]]
        if policy.smooth_over == "tokens":
            smoothed = smooth(raw.smoothed[thought], policy.ewma)[[thought.index(at) for at in boundaries]]
        else:
            smoothed = smooth(raw.smoothed[boundaries], policy.ewma)
        long_enough = np.array([raw.thought[at] >= policy.min_thinking_tokens for at in boundaries], dtype=np.bool_)
        fires = held(policy.holds(smoothed)[None].numpy(), policy.patience) & long_enough
        index = first_fire(fires, np.array([len(boundaries)]))[0]
        replayed = [*boundaries, len(stream.tokens)][index]
        same("replay decides as the tracker does", walk.exit, replayed, given=(policy, stream.tokens))


def limits_are_kept(policy: ExitPolicy, streams: Sequence[Stream], tracker: type[ExitTracker]) -> None:
    """No exit before the minimum, nor before the predicate has held at `patience` boundaries in a row.

    Raises:
        LawError: There is one.
    """
    for patience, minimum in ((policy.patience, policy.min_thinking_tokens), (2, 0), (1, 9)):
        asked = replace(policy, patience=patience, min_thinking_tokens=minimum)
        for stream, walk in zip(streams, walk_streams(asked, streams, tracker), strict=True):
            if walk.exit == len(stream.tokens):
                continue
            given = (policy, f"patience {patience}, min_thinking_tokens {minimum}", stream.tokens)
            thought = walk.thought[walk.exit]
            holds("the minimum is kept", thought >= minimum, given=given, expected=f">= {minimum} tokens", got=thought)
            verdicts = [bool(policy.holds(walk.smoothed[at])) for at in range(walk.exit + 1) if walk.closed[at]]
            last = verdicts[-patience:]
            same("the patience is kept", last, [True] * patience, given=given)


def only_the_first_block_is_exited(policy: ExitPolicy, streams: Sequence[Stream], walks: Sequence[Walk]) -> None:
    """Nothing is forced from the end of the first think block on.

    Raises:
        LawError: Something is.
    """
    for stream, walk in zip(streams, walks, strict=True):
        later = walk.forced[_end_of_first_block(walk) :]
        same("only the first think block is exited", later, [-1] * len(later), given=(policy, stream.tokens))


def stricter_policies(policy: ExitPolicy) -> list[ExitPolicy]:
    """The policy with one bound tightened, a longer patience, or a longer minimum."""
    out = [
        replace(policy, patience=policy.patience + 1),
        replace(policy, min_thinking_tokens=policy.min_thinking_tokens + 7),
    ]
    for name, bound in policy.thresholds.items():
        step = max(0.1, 0.2 * abs(bound))
        out.append(
            replace(policy, thresholds={**policy.thresholds, name: bound - step if _falls(name) else bound + step})
        )
    if policy.score is not None:
        out.append(replace(policy, score=replace(policy.score, threshold=policy.score.threshold + 0.1)))
    return out


def a_stricter_policy_is_never_earlier(
    policy: ExitPolicy, streams: Sequence[Stream], walks: Sequence[Walk], tracker: type[ExitTracker]
) -> None:
    """A stricter policy exits where the policy does, or later.

    Raises:
        LawError: It exits earlier.
    """
    law = "a stricter policy never exits earlier"
    for stricter in stricter_policies(policy):
        for stream, walk, found in zip(streams, walks, walk_streams(stricter, streams, tracker), strict=True):
            given = (policy, stricter, stream.tokens)
            holds(law, found.exit >= walk.exit, given=given, expected=f"token {walk.exit} or later", got=found.exit)


def nan_never_fires(policy: ExitPolicy) -> None:
    """The predicate does not hold where a signal that it needs is NaN.

    Raises:
        LawError: It holds.
    """
    law = "NaN never fires"
    rows = [torch.full((len(SIGNALS),), torch.nan)]
    if policy.predicate in ("all", "score"):
        names = policy.score.signals if policy.score is not None else tuple(policy.thresholds)
        for name in names:
            best = torch.tensor([-1e6 if _falls(other) else 1e6 for other in SIGNALS])
            rows.append(torch.where(torch.tensor([other == name for other in SIGNALS]), torch.nan, best))
    for row in rows:
        with RaisesNothing(law, given=(policy, row)):
            same(law, bool(policy.holds(row)), False, given=(policy, row))


def json_brings_it_back(policy: ExitPolicy) -> None:
    """`from_json(to_json())`, by way of JSON text, is the policy.

    Raises:
        LawError: It is not.
    """
    law = "JSON brings the policy back"
    with RaisesNothing(law, given=policy):
        written = policy.to_json()
        again = type(policy).from_json(json.loads(json.dumps(written, allow_nan=False)))
    same(law, again, policy, given=written)


def changes_break_the_seal(policy: ExitPolicy) -> None:
    """A certified policy that was changed is refused; as it was written it is read.

    Raises:
        LawError: It is read.
    """
    law = "a certified policy that was changed is refused"
    with RaisesNothing(law, given=policy):
        sealed = policy.with_certificate({"alpha": 0.02}).to_json()
        type(policy).from_json(sealed)
    changes: list[dict[str, JSON]] = [
        {"ewma": policy.ewma / 2},
        {"certificate": {"alpha": 0.5}},
    ]
    for change in changes:
        with refuses(law, given=change):
            type(policy).from_json({**sealed, **change})


@dataclass(frozen=True)
class _HandsThrough:
    """Hands the streams' signals through."""

    def __call__(
        self, scalars: Float[Tensor, "B R C"], candidates: Float[Tensor, "B R D"], hidden: Hidden
    ) -> Float[Tensor, "B R L"]:
        return hidden.last


def _start(policy: ExitPolicy, count: int, tracker: type[ExitTracker]) -> ExitTracker:
    running = tracker(
        markers=ThinkMarkers((_START,), _END),
        tables=BoundaryTables.from_texts(_TEXTS),
        policy=policy,
        signaller=_HandsThrough(),
        num_slots=count,
        window=16,
        device=torch.device("cpu"),
    )
    running.admit(
        torch.arange(count),
        torch.ones(count, dtype=torch.long),
        in_think=torch.zeros(count, dtype=torch.bool),
        armed=torch.ones(count, dtype=torch.bool),
    )
    return running


def _rows(streams: Sequence[Stream], windows: Sequence[list[int]], at: int) -> Rows:
    """Rows of a step in which every stream verifies a window from its token `at` on; drafts carry other signals."""
    width = len(windows[0])
    own = [min(width, len(stream.tokens) - at) for stream in streams]
    signals = [stream.signals.new_full((width, len(LEARNED)), 0.5) for stream in streams]
    logprobs = [stream.logprobs.new_full((width,), -1.0) for stream in streams]
    for row, (stream, count) in enumerate(zip(streams, own, strict=True)):
        signals[row][:count] = stream.signals[at : at + count]
        logprobs[row][:count] = stream.logprobs[at : at + count]
    return Rows(
        tokens=torch.tensor(windows),
        positions=torch.arange(at + 1, at + 1 + width).repeat(len(streams), 1),
        logprobs=torch.stack(logprobs),
        entropy=torch.zeros(len(streams), width),
        hidden=Hidden(torch.stack(signals), torch.zeros(len(streams), width, 0)),
    )


def _end_of_first_block(walk: Walk) -> int:
    return next(at for at in range(1, len(walk.in_think)) if walk.in_think[at - 1] and not walk.in_think[at])


def _falls(name: str) -> bool:
    """Whether a threshold on the signal holds below its bound."""
    return BY_NAME[name].falls


def _against(policy: ExitPolicy, name: str) -> bool:
    """Whether high values of the signal argue against an exit."""
    if policy.score is not None and name in policy.score.signals:
        return policy.score.weights[policy.score.signals.index(name)] < 0
    return _falls(name)


def _same_numbers(
    law: str, got: Float[Tensor, "*rows S"], expected: Float[Tensor, "*rows S"], *, given: object
) -> None:
    close = torch.allclose(got, expected, atol=1e-6, equal_nan=True)
    holds(law, close, given=given, expected=str(expected.tolist()), got=got.tolist())

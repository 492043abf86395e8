"""Example traces for a report: chosen by a fixed rule, and shown with the text that the model wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from numpy import ndarray

from ace_learn.evaluate.page import TraceParagraph, TraceView
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import ExitPolicy
from ace_learn.labels.records import TraceRecord
from ace_learn.signals import SIGNALS

SCORE = "score"
"""Under this name the exit rule's own probability is shown, where it has one."""

RULE = (
    "The first test problem of each family, by number, on which the learned exit saves tokens; and the first that it "
    "loses (full thinking is right, the early answer is not), where there is one and it is not among them."
)
"""How `choose` chooses, in words."""


class Example(NamedTuple):
    """A trace to show.

    Attributes:
        place: its place among the test traces.
        reason: why it was chosen.
    """

    place: int
    reason: str


def choose(traces: Traces, exit_index: Int[ndarray, " n"]) -> tuple[Example, ...]:
    """The examples of a report, as `RULE` says; families by name.

    Args:
        traces: the n test traces.
        exit_index: the learned policy's exit of each.
    """
    tokens = traces.tokens_at[np.arange(traces.num_problems), exit_index]
    order = np.argsort(traces.problem, kind="stable").tolist()
    early = [place for place in order if tokens[place] < traces.full_tokens[place]]
    families = sorted({traces.family[place] for place in early})
    firsts = [next(place for place in early if traces.family[place] == family) for family in families]
    chosen = [
        Example(place, f"the first test problem of the family {traces.family[place]!r} on which the exit saves tokens")
        for place in firsts
    ]
    lost = [p for p in early if traces.full_correct[p] and not traces.correct_at[p, exit_index[p]]]
    if lost and lost[0] not in firsts:
        chosen.append(Example(lost[0], f"the first of {len(lost)} problems that the exit loses"))
    return tuple(chosen)


def trace_view(
    example: Example,
    record: TraceRecord,
    smoothed: Float32[ndarray, "P S"],
    *,
    policy: ExitPolicy,
    exit_index: int,
    decode: Callable[[Sequence[int]], str],
) -> TraceView:
    """One trace with the signals that the exit rule saw.

    Args:
        example: why it is shown.
        record: the stored trace.
        smoothed: the signals at its boundaries, smoothed as the policy says; padding rows are left out.
        policy: the exit rule.
        exit_index: where it exits.
        decode: from token ids to text.
    """
    ends = [record.think_start + end + 1 for end in record.boundary]
    natural = exit_index == len(ends)
    full, early = record.full_tokens, (record.full_tokens if natural else record.probe_tokens[exit_index])
    signals = signal_values(policy, smoothed[: len(ends)])
    paragraphs = [
        TraceParagraph(
            text=decode(record.token_ids[start:end]),
            signals={name: float(values[place]) for name, values in signals.items()},
            matches=record.probe_matches[place] is True,
            answer=_plain(record.probe_answer[place]),
        )
        for place, (start, end) in enumerate(zip([record.think_start, *ends], ends, strict=False))
    ]
    rest = decode(record.token_ids[(ends or [record.think_start])[-1] : record.think_end])
    if rest.strip() or not ends:
        known = record.full_answer is not None
        paragraphs.append(TraceParagraph(text=rest, matches=known, answer=_plain(record.full_answer), closed=False))
    return TraceView(
        heading=f"Problem {record.problem} ({record.family})",
        prompt=record.prompt,
        paragraphs=tuple(paragraphs),
        exit_index=exit_index,
        full_answer=_plain(record.full_answer),
        early_answer=_plain(record.full_answer if natural else record.probe_answer[exit_index]),
        note=f"{example.reason[:1].upper()}{example.reason[1:]}: {early} output tokens instead of {full}.",
        bounds=bounds(policy),
        gold=_plain(record.gold),
    )


def signal_values(policy: ExitPolicy, smoothed: Float32[ndarray, "P S"]) -> dict[str, Float[ndarray, " P"]]:
    """What to show of a trace's signals: the score of a score rule first, then every signal that is known, by name."""
    columns = zip(SIGNALS, smoothed.T, strict=False)  # the learned ones come first, and may stand alone
    shown = {name: column.astype(np.float64) for name, column in columns if not np.isnan(column).all()}
    if policy.score is None:
        return shown
    score = policy.score.probability(torch.from_numpy(smoothed)).double().numpy()
    return {SCORE: score, **shown}


def bounds(policy: ExitPolicy) -> dict[str, float]:
    """The bounds of a rule by the name of the signal that they bound."""
    known = {SCORE: policy.score.threshold} if policy.score is not None else dict(policy.thresholds)
    return {name: bound for name, bound in known.items() if math.isfinite(bound)}


def _plain(answer: str | None) -> str | None:
    """A stored answer, which is JSON, as a reader expects it: a text without its quotes."""
    value = None if answer is None else json.loads(answer)
    return value if isinstance(value, str) else answer

"""The position-keyed tracker against a slow sequential reading of the exit rule, under random verification."""

import math
import random

import pytest
import torch

from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows
from ace_learn.thinking import BoundaryTables, ThinkMarkers

TEXTS = ["a", "\n", "\n\n", ".\n\n", "<t>", "</", "t>", "b"]
START, END = (4,), (5, 6)
VOCAB = len(TEXTS)


def signal_of(prefix):
    """A signal that depends on the whole prefix, so that any slip of the state shows."""
    return (hash(tuple(prefix)) % 997) / 997


def logprob_of(prefix):
    return -((hash((*prefix, "p")) % 89) / 89 + 0.01)


def sequential(tokens, policy):
    """Slow reference: after each token (in_think, thought, paragraph log-probs, smoothed signal, forced token)."""
    out, in_think, thought, text, average, held, forcing = [], False, 0, "", None, 0, 0
    closed, paragraph = False, []
    for i, token in enumerate(tokens):
        prefix = tokens[: i + 1]
        if in_think and tuple(prefix[-2:]) == END:
            in_think = False
        elif not in_think and token == START[0]:
            in_think, thought, text, closed, paragraph = True, 0, "", False, []
            out.append((True, 0, 0.0, average or 0.0, -1))
            continue
        forced = -1
        if in_think:
            thought += 1
            paragraph = ([] if closed else paragraph) + [logprob_of(prefix)]
            in_break = text.strip() == "" or text[len(text.rstrip()) :].count("\n") >= 2
            was_break = in_break and TEXTS[token].isspace()
            text += TEXTS[token]
            closed = bool(text.strip()) and text[len(text.rstrip()) :].count("\n") >= 2 and not was_break
            if policy.smooth_over == "tokens" or closed:
                value = signal_of(prefix)
                average = value if average is None else policy.ewma * value + (1 - policy.ewma) * average
            if closed:
                held = held + 1 if average > policy.thresholds["confidence"] else 0
        if forcing == 1:
            forced, forcing = END[1], 2
        elif in_think and closed and not forcing and held >= policy.patience and thought >= policy.min_thinking_tokens:
            forced, forcing = END[0], 1
        mean = sum(paragraph) / len(paragraph) if paragraph else 0.0
        out.append((in_think, thought if in_think or thought else 0, mean, average or 0.0, forced))
    return out


def rows_for(tokens, first, count):
    """Rows of a verify step over the tokens at positions first..first+count-1 of a sequence with one prompt token."""
    prefixes = [tokens[:p] for p in range(first, first + count)]
    value = torch.tensor([[signal_of(prefix) for prefix in prefixes]])
    return Rows(
        tokens=torch.tensor([[prefix[-1] for prefix in prefixes]]),
        positions=torch.arange(first, first + count)[None],
        logprobs=torch.tensor([[logprob_of(prefix) for prefix in prefixes]]),
        entropy=torch.zeros(1, count),
        hidden=Hidden(value[..., None], torch.zeros(1, count, 0)),
    )


class FromHidden:
    """Hands the test's signal through as `confidence`."""

    def __call__(self, scalars, candidates, hidden):
        return hidden.last.expand(*hidden.last.shape[:2], 4)


def admit(tracker, *, in_think, armed=True):
    flags = {"in_think": torch.tensor([in_think]), "armed": torch.tensor([armed])}
    tracker.admit(torch.tensor([1]), torch.tensor([1]), **flags)


def tracker_for(policy, window=24):
    tracker = ExitTracker(
        markers=ThinkMarkers(START, END),
        tables=BoundaryTables.from_texts(TEXTS),
        policy=policy,
        signaller=FromHidden(),
        num_slots=3,
        window=window,
        device=torch.device("cpu"),
    )
    admit(tracker, in_think=False)
    return tracker


@pytest.mark.parametrize("smooth_over", ["tokens", "boundaries"])
@pytest.mark.parametrize("patience", [1, 2])
def test_any_verification_pattern_gives_the_sequential_state(smooth_over, patience):
    """Random windows with rejected drafts behind them: every committed row has the sequential reference's verdict."""
    policy = ExitPolicy(
        predicate="all",
        thresholds={"confidence": 0.45},
        ewma=0.4,
        smooth_over=smooth_over,
        patience=patience,
        min_thinking_tokens=5,
    )
    draw = random.Random(7)
    fired = 0
    for _ in range(60):
        tokens = [4, *draw.choices([0, 1, 2, 3, 7, 0, 7, 5], k=40), 5, 6, 0, 2]
        wanted = sequential(tokens, policy)
        tracker, position = tracker_for(policy), 1
        while position <= len(tokens):
            kept = min(draw.randint(1, 5), len(tokens) - position + 1)
            drafts = [*tokens[: position + kept - 1], *draw.choices(range(VOCAB), k=draw.randint(0, 3))]
            verdict = tracker.observe(torch.tensor([1]), rows_for(drafts, position, len(drafts) - position + 1))
            for r in range(kept):
                in_think, thought, mean, smoothed, forced = wanted[position + r - 1]
                assert bool(verdict.in_think[0, r]) == in_think
                assert int(verdict.thought[0, r]) == thought
                assert float(verdict.confidence[0, r]) == pytest.approx(math.exp(mean), abs=1e-5)
                assert float(verdict.smoothed[0, r, 0]) == pytest.approx(smoothed, abs=1e-5)
                assert int(verdict.forced[0, r]) == forced
                fired += forced >= 0
            position += kept
    assert fired > 20


def test_a_slot_is_cleared_when_it_is_reused():
    policy = ExitPolicy(predicate="all", thresholds={"confidence": 0.0})
    tracker = tracker_for(policy)
    tracker.observe(torch.tensor([1]), rows_for([4, 0, 0, 0], 1, 4))
    admit(tracker, in_think=True)
    verdict = tracker.observe(torch.tensor([1]), rows_for([0], 1, 1))
    assert bool(verdict.in_think[0, 0])
    assert int(verdict.thought[0, 0]) == 1
    with pytest.raises(RuntimeError):  # the state of the former request at position 3 is gone
        tracker.observe(torch.tensor([1]), rows_for([4, 0, 0, 0], 4, 1))


def test_a_lost_state_is_an_error_not_a_guess():
    tracker = tracker_for(ExitPolicy.never())
    with pytest.raises(RuntimeError):
        tracker.observe(torch.tensor([1]), rows_for([4, 0, 0, 0], 3, 1))


def test_signals_need_a_head():
    with pytest.raises(ValueError, match="name a head folder"):
        ExitTracker(
            markers=ThinkMarkers(START, END),
            tables=BoundaryTables.from_texts(TEXTS),
            policy=ExitPolicy.specexit(),
            signaller=None,
            num_slots=1,
            window=4,
            device=torch.device("cpu"),
        )


def forced_tokens(tokens, policy, *, in_think=False, armed=True):
    tracker = tracker_for(policy)
    admit(tracker, in_think=in_think, armed=armed)
    rows = [rows_for(tokens, p, 1) for p in range(1, len(tokens) + 1)]
    return [int(tracker.observe(torch.tensor([1]), row).forced[0, 0]) for row in rows]


def test_only_the_first_block_is_exited():
    eager = ExitPolicy(predicate="all", thresholds={"confidence": -1.0}, patience=2)
    assert forced_tokens([4, 0, 2, 0, 2], eager)[-1] == END[0]
    ended_by_itself, exited = [4, 0, 2, 5, 6], [4, 0, 2, 0, 2, 5, 6]
    for first in (ended_by_itself, exited):
        assert forced_tokens([*first, 4, 0, 2, 0, 2, 0, 2], eager)[len(first) :] == [-1] * 7


def test_an_unarmed_request_is_never_exited():
    eager = ExitPolicy(predicate="all", thresholds={"confidence": -1.0})
    assert forced_tokens([4, 0, 2, 0, 2], eager, armed=False) == [-1] * 5
    assert forced_tokens([0, 2, 0], eager, in_think=True) == [-1, END[0], END[1]]

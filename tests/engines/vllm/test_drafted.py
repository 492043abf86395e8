"""The hook on the drafter's states: told of them behind each step, it says what one token per step gives."""

import random

import pytest
import torch

from ace_learn.engines.vllm.drafted import DraftedRows, DraftedStates
from ace_learn.features.spec import FeatureSpec
from ace_learn.speculation.drafters import DraftStates
from tests.engines.vllm.hook_world import (
    DELAY,
    HIDDEN,
    Schedule,
    drafted_of,
    make_head,
    make_hook,
    new_live,
    reference,
    rows_of,
    window,
)

STATES = DraftStates(size=HIDDEN, delay=DELAY, drafter="of the test")
SPEC = FeatureSpec(sources=("draft", "scalars"), hidden_size=HIDDEN, aux_layers=(), draft=STATES)


class Drafting(Schedule):
    """Runs the drafter behind every step but `skipped`: over chunks, windows, rejected drafts, and steps that are
    dropped, whose tokens are others when they are drawn again."""

    def __init__(self, hook, lives, seed, *, skipped=(), **options):
        super().__init__(hook, lives, seed, **options)
        self.lives, self.ran, self.dropped = {live.request_id: live for live in lives}, {}, set()
        self.steps, self.skipped = 0, skipped

    def _preempt(self, live, parts):
        super()._preempt(live, parts)
        self.dropped.add(live.request_id)

    def _observe(self, parts, kept):
        super()._observe(parts, kept)
        self.steps += 1
        counts = {live.request_id: count for live, _, count in kept}
        hidden, positions, first, last = [], [], [], []
        for request_id, at, mine in parts:
            ids, start = self.lives[request_id].ids, min(self.ran.get(request_id, 0), at)
            end = at + counts.get(request_id, 1) - 1  # its last row whose next token is known
            first.append(len(hidden))
            last.append(len(hidden) + end - start)
            for position in range(start, at + len(mine)):
                known = position <= end and request_id not in self.dropped
                hidden.append(drafted_of(ids, position) if known else torch.full((HIDDEN,), 1e3))
                positions.append(position)
            self.ran[request_id] = 0 if request_id in self.dropped else end + 1
        self.dropped.clear()
        longest = max(b - a for a, b in zip(first, [*first[1:], len(hidden)], strict=True))
        hidden += [torch.full((HIDDEN,), torch.nan)] * 3  # padding
        rows = DraftedRows(
            torch.stack(hidden), torch.tensor(positions), torch.tensor(first), torch.tensor(last), longest
        )
        if self.steps not in self.skipped:
            self.hook.keep_drafted([request_id for request_id, _, _ in parts], lambda: rows)


def run(seed=1, *, count=16, **options):
    """The schedule, and per request what was forced behind each output token, beside what should be."""
    draw = random.Random(3)
    lives = [new_live(str(i), draw) for i in range(count)]
    head = make_head(spec=SPEC)
    schedule = Drafting(make_hook(signaller=head, spec=SPEC), lives, seed, **options).run()
    expected = [[token for token, *_ in reference(live, signaller=head)] for live in lives]
    found = [
        [schedule.forced[live.request_id][len(live.prompt) + i] for i in range(len(tokens))]
        for live, tokens in zip(lives, expected, strict=True)
    ]
    return schedule, found, expected


@pytest.mark.parametrize("lag", [0, 2])
def test_any_schedule_gives_what_one_token_per_step_gives(lag):
    schedule, found, expected = run(lag=lag)
    assert found == expected
    assert sum(5 in tokens for tokens in expected) >= 7
    assert schedule.preemptions > 5
    assert not schedule.failures


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_state_that_is_off_by_one_is_found(monkeypatch, shift):
    read = DraftedStates.read
    monkeypatch.setattr(DraftedStates, "read", lambda self, rows, at, table: read(self, rows, at + shift, table))
    _, found, expected = run()
    assert found != expected


def test_where_the_drafter_was_not_run_nothing_is_forced_any_more():
    schedule, found, expected = run(skipped=range(6, 400, 7))
    assert not schedule.failures
    lost = 0
    for ours, theirs in zip(found, expected, strict=True):
        assert all(token in (-1, wanted) for token, wanted in zip(ours, theirs, strict=True))
        lost += ours != theirs
    assert lost >= 3


def test_a_drafter_of_another_size_costs_the_exits_of_the_step_alone():
    hook = make_hook(signaller=make_head(spec=SPEC), spec=SPEC)
    live = new_live("0", random.Random(3))
    hook.admit("0", live.prompt, live.options)
    rows = rows_of([window(live, 1)])
    hook.observe(rows)
    assert hook.report().failures == []
    one = torch.zeros(1, dtype=torch.long)
    hook.keep_drafted(["0"], lambda: DraftedRows(torch.zeros(1, HIDDEN + 1), one, one, one, 1))
    assert hook.observe(rows) is None
    ((request_id, what),) = hook.report().failures
    assert (request_id, what) == (
        "0",
        f"ValueError: the drafter's hidden size is {HIDDEN + 1}, and the head was trained with {HIDDEN}",
    )

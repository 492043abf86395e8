"""Whatever fails inside the hook stays with the requests concerned, and the others get what they would have got."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.engines.vllm.hook_world import Live, Options, Schedule, make_head, make_hook, rows_of, window
from tests.engines.vllm.test_hook import EAGER, compare, many, prepared, thinker

BAD = 9
"""A head that is told to fail does so for rows whose prefix ends with this token."""


class Faulty:
    """A head that fails on some rows, told by a column of the hidden state that the test overwrites."""

    def __init__(self, fault):
        self.head, self.fault = make_head(), fault

    def __call__(self, scalars, candidates, hidden):
        bad = hidden.last[..., 0] == BAD
        signals = self.head(scalars, candidates, hidden)
        if self.fault == "raises" and bool(bad.any()):
            raise ArithmeticError("planted")
        if self.fault == "shape" and bool(bad.any()):
            return signals[..., :3]
        if self.fault == "nan":
            return torch.where(bad[..., None], torch.nan, signals)
        return signals


def step(hook, lives, sizes, bad=()):
    rows = rows_of([window(live, size) for live, size in zip(lives, sizes, strict=True)])
    first = 0
    for live, size in zip(lives, sizes, strict=True):
        if live.request_id in bad:
            rows.hidden[first : first + size, 0] = BAD
        first += size
        live.at += size
    forced = hook.observe(rows)
    parts = [[-1] * size for size in sizes] if forced is None else [part.tolist() for part in forced.split(sizes)]
    return dict(zip([live.request_id for live in lives], parts, strict=True)), hook.report()


def three(fault, *, reports=True, **options):
    lives = [thinker("a"), thinker("b"), thinker("c")]
    hook = make_hook(EAGER, signaller=Faulty(fault), reports=reports, **options)
    return lives, prepared(lives, hook, reports=reports)


@pytest.mark.parametrize(("fault", "what"), [("raises", "ArithmeticError: planted"), ("shape", "signals of shape")])
def test_a_failure_is_the_requests_own(fault, what, caplog):
    lives, hook = three(fault)
    forced, report = step(hook, lives, [1, 2, 1], bad=["b"])
    assert [request_id for request_id, _ in report.failures] == ["b"]
    assert what in report.failures[0][1]
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    forced, report = step(hook, lives, [1, 1, 1])
    assert forced == {"a": [5], "b": [-1], "c": [5]}
    assert not report.failures
    assert len(caplog.records) == 1


def test_nan_is_the_requests_own(caplog):
    lives, hook = three("nan")
    step(hook, lives, [1, 1, 1], bad=["b"])
    forced, report = step(hook, lives, [1, 1, 1])
    assert forced == {"a": [5], "b": [-1], "c": [5]}
    assert report.failures == [("b", "a signal that the exit policy reads is NaN")]
    assert len(caplog.records) == 1
    forced, report = step(hook, lives, [1, 1, 1])
    assert forced["a"] == forced["c"] == [6]
    assert not report.failures


def test_nan_behind_a_rejected_draft_is_forgotten():
    live = thinker("a")
    hook = prepared([live], make_hook(EAGER, signaller=Faulty("nan")))
    rows = rows_of([window(live, 1, drafts=[0, 0])])
    rows.hidden[1:, 0] = BAD
    hook.observe(rows)
    hook.report()
    live.at += 1
    forced, report = step(hook, [live], [1])
    assert forced == {"a": [5]}
    assert not report.failures


def test_a_request_that_was_never_admitted_is_left_alone():
    lives, hook = three(None)
    stranger = thinker("stranger")
    stranger.at = 2
    forced, report = step(hook, [*lives, stranger], [1, 1, 1, 2])
    assert [request_id for request_id, _ in report.failures] == ["stranger"]
    forced, report = step(hook, [*lives, stranger], [1, 1, 1, 1])
    assert forced == {"a": [5], "b": [5], "c": [5], "stranger": [-1]}
    assert not report.failures


def test_a_state_that_was_lost_forces_nothing():
    lives, hook = three(None)
    lives[1].at += 1  # its row is skipped
    forced, _ = step(hook, lives, [2, 1, 2])
    assert forced == {"a": [-1, 5], "b": [-1], "c": [-1, 5]}


def test_a_policy_of_another_family_is_a_failure_of_its_request():
    hook = make_hook(EAGER)
    hook.admit("x", [4], Options(policy=replace(EAGER, ewma=0.25)))
    hook.observe(rows_of([("x", 0, [[4]])]))
    ((request_id, what),) = hook.report().failures
    assert request_id == "x"
    assert "more" in what


def test_rows_that_do_not_fit_fail_as_a_whole():
    lives, hook = three(None)
    rows = rows_of([window(live, 1) for live in lives])
    assert hook.observe(rows._replace(hidden=rows.hidden[:2])) is None
    report = hook.report()
    assert [request_id for request_id, _ in report.failures] == ["a", "b", "c"]
    assert "3 tokens, but rows of {'hidden': 2}" in report.failures[0][1]


def test_missing_layers_are_named():
    lives, hook = three(None)
    rows = rows_of([window(live, 1) for live in lives])
    hook.observe(rows._replace(aux=None))
    assert "target_aux" in hook.report().failures[0][1]


def test_a_failure_that_is_nobodys_alone_is_everybodys():
    class Jointly:
        def __call__(self, scalars, candidates, hidden):
            if scalars.shape[:2].numel() > 2:
                raise RuntimeError("too many rows")
            return torch.zeros(*scalars.shape[:2], 4)

    lives = [thinker("a"), thinker("b")]
    hook = prepared(lives, make_hook(EAGER, signaller=Jointly(), max_failures=2))
    _, report = step(hook, lives, [2, 2])
    assert [request_id for request_id, _ in report.failures] == ["a", "b"]
    assert not report.off  # one failure


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_after_too_many_failures_the_hook_is_off(fault, caplog):
    lives, hook = three(fault, max_failures=2)
    step(hook, lives, [1, 1, 1], bad=["a", "b"])
    forced, report = step(hook, lives, [1, 1, 1])
    assert forced == {"a": [-1], "b": [-1], "c": [-1]}
    assert report.off
    assert hook.off
    assert "is off after 2 failures" in caplog.records[-1].message
    late = Live("late", [4], [0, 2], Options(policy=EAGER))
    hook.admit("late", late.prompt, late.options)
    assert hook.observe(rows_of([window(late, 1)])) is None
    assert hook.report().off


def test_ranks_agree_whenever_reports_are_read():
    def run(*, reads):
        lives, hook = three("nan", ranks=2, reports=reads, max_failures=2)
        forced = []
        for number in range(3):
            rows = rows_of([window(live, 1) for live in lives])
            if number == 0:
                rows.hidden[:2, 0] = BAD
            forced.append(hook.observe(rows).tolist())
            for live in lives:
                live.at += 1
            if reads:
                hook.report()
        return forced, len(hook._pending)

    (first, pending), (second, unread) = run(reads=True), run(reads=False)
    assert first == second
    assert pending == unread == 0


def test_others_are_untouched_under_any_schedule():
    lives = many(12, policy=EAGER)
    plain = Schedule(make_hook(EAGER), lives, seed=8).run()
    assert compare(plain, lives)
    for live in lives:
        live.at = 0

    class FailsAt(Faulty):
        calls = 0

        def __call__(self, scalars, candidates, hidden):
            FailsAt.calls += 1
            if 30 <= FailsAt.calls < 33:
                raise ArithmeticError("planted")
            return self.head(scalars, candidates, hidden)

    hook = make_hook(EAGER, signaller=FailsAt(None))
    faulty = Schedule(hook, lives, seed=8).run()
    failed = {request_id for request_id, _ in faulty.failures}
    assert failed
    untouched = [live for live in lives if live.request_id not in failed]
    assert compare(faulty, untouched) > 4


def test_failures_are_logged_by_the_hooks_logger(caplog):
    lives, hook = three("raises")
    with caplog.at_level(logging.ERROR, logger="ace_learn.engines.vllm.hook"):
        step(hook, lives, [1, 1, 1], bad=["c"])
    assert "exits are given up for c, and it goes on without: ArithmeticError: planted" in caplog.text

"""The exit rule on the host: without speculation, on a CPU, under the same schedules and against the same reference."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ace_learn.engines.vllm.device_rule import DeviceRule
from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.host_rule import HostRule, _Logits
from tests.engines.vllm.hook_world import (
    BODY,
    HIDDEN,
    MARKERS,
    POLICY,
    TABLES,
    VOCAB,
    WHITE,
    Options,
    Schedule,
    make_hook,
    new_live,
    rows_of,
    token_logits,
    window,
)
from tests.engines.vllm.test_hook import ANY, SCORE, compare, many, prepared, thinker

LINES = replace(POLICY, smooth_over="boundaries")
ALWAYS = replace(LINES, thresholds={"confidence": -1.0, "remaining": 1e9}, min_thinking_tokens=0)
BAD = 9
"""A head that is told to fail does so for rows whose hidden state starts with this."""


ONE_ROW = {"num_draft_tokens": 0, "steps_in_flight": 1}


def host_hook(policy=LINES, num_requests=40):
    hook = make_hook(policy, num_requests=num_requests, **ONE_ROW)
    assert isinstance(hook._rule, HostRule)
    return hook


def step(hook, lives, **changes):
    """One row of each; what is forced behind it, and the report."""
    rows = rows_of([window(live, 1) for live in lives], **changes)
    forced = hook.observe(rows)
    for live in lives:
        live.at += 1
    return [-1] * len(lives) if forced is None else forced.tolist(), hook.report()


@pytest.mark.parametrize("body", [BODY, WHITE], ids=["lines", "white space"])
@pytest.mark.parametrize(
    ("policy", "at_once", "lag"), [(LINES, 3, 1), (ANY, 1, 0), (ANY, 4, 2), (SCORE, 40, 1), (ALWAYS, 3, 2)]
)
def test_any_schedule_gives_what_one_token_per_step_gives(policy, at_once, lag, body):
    lives = many(40, policy=policy, body=body)
    hook = host_hook(policy)
    schedule = Schedule(hook, lives, seed=2, at_once=at_once, num_draft_tokens=0, lag=lag).run()
    assert compare(schedule, lives) >= 12
    assert schedule.preemptions > 5
    assert not schedule.failures
    assert hook.num_followed == 0


def test_room_grows_with_the_requests():
    lives = many(20, policy=LINES)
    hook = host_hook(num_requests=2)
    assert compare(Schedule(hook, lives, seed=2, at_once=10, num_draft_tokens=0).run(), lives) >= 5
    assert len(hook._rule._above) == 16


def test_requests_of_one_batch_have_their_own_bounds():
    policies = [LINES, replace(LINES, patience=2), replace(LINES, min_thinking_tokens=15), ALWAYS]
    draw = random.Random(5)
    lives = [new_live(str(i), draw, Options(policy=policies[i % len(policies)])) for i in range(30)]
    assert compare(Schedule(host_hook(), lives, seed=4, num_draft_tokens=0).run(), lives) >= 8


@pytest.mark.parametrize("shift", ["hidden", "tokens", "logits"])
def test_a_row_that_is_off_by_one_is_found(shift):
    lives = many(20, policy=LINES)
    hook = host_hook()
    apply = hook._rule.apply
    moved = lambda rows, picks: apply(rows._replace(**{shift: getattr(rows, shift).roll(1, 0)}), picks)  # noqa: E731
    hook._rule.apply = moved
    schedule = Schedule(hook, lives, seed=2, num_draft_tokens=0).run()
    with pytest.raises(AssertionError):
        compare(schedule, lives)


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": 1},
        {"steps_in_flight": 2},
        {"policy": POLICY},
        {"signaller": lambda *rows: torch.zeros(1, 1, 4)},
    ],
    ids=["drafts", "a step that may be taken back", "every token moves the average", "a head of another kind"],
)
def test_elsewhere_the_rule_is_in_tensors(options):
    assert isinstance(make_hook(**({"policy": LINES} | ONE_ROW | options))._rule, DeviceRule)


def without_head(policy, **options):
    return ExitHook(
        markers=MARKERS,
        tables=TABLES,
        policy=policy,
        signaller=None,
        spec=None,
        token_logits=token_logits,
        device=torch.device("cpu"),
        **options,
    )


@pytest.mark.parametrize("options", [ONE_ROW, {"num_draft_tokens": 2}])
def test_a_policy_on_learned_signals_needs_a_head(options):
    with pytest.raises(ValueError, match="name a head folder"):
        without_head(LINES, **options)


def test_shadowed_requests_are_reported_and_left_alone():
    lives = [thinker("a", output=(0, 2, 7, 0), policy=ALWAYS), thinker("b", output=(0, 2, 7, 0), policy=ALWAYS)]
    lives[1].options = replace(lives[1].options, shadow=True)
    hook = prepared(lives, host_hook(ALWAYS))
    step(hook, lives)
    assert hook.open.tolist() == [True, False]
    forced, report = step(hook, lives)
    assert forced == [5, -1]
    assert [(event.request_id, event.forced, event.position) for event in report.exits] == [
        ("a", True, 3),
        ("b", False, 3),
    ]


def test_a_grammar_that_forbids_the_think_end_lets_it_begin_at_the_next_boundary():
    live = thinker("a", output=(0, 2, 0, 2, 5, 6), policy=ALWAYS)
    hook = prepared([live], host_hook(ALWAYS))
    step(hook, [live])
    forced, report = step(hook, [live], allowed=torch.tensor([[False, True]]))
    assert (forced, report.blocked, report.exits) == ([-1], [("a", 0)], [])
    step(hook, [live])
    forced, report = step(hook, [live], allowed=torch.tensor([[True, True]]))
    assert (forced, [event.paragraphs for event in report.exits]) == ([5], [2])
    assert step(hook, [live])[0] == [6]  # the think end has two tokens


def test_what_is_forced_is_said_again_of_a_step_that_was_dropped():
    live = thinker("a", output=(0, 2, 5, 6), policy=ALWAYS)
    hook = prepared([live], host_hook(ALWAYS))
    step(hook, [live])
    assert step(hook, [live])[0] == [5]
    live.at -= 1
    forced, report = step(hook, [live])
    assert (forced, [event.position for event in report.exits]) == ([5], [3])


def test_a_state_that_was_lost_forces_nothing():
    lives = [thinker(name, output=(0, 2, 0, 2), policy=ALWAYS) for name in "ab"]
    hook = prepared(lives, host_hook(ALWAYS))
    lives[1].at += 1  # its row is skipped
    step(hook, lives)
    assert hook.open.tolist() == [True, False]
    assert step(hook, lives)[0] == [5, -1]


def test_a_token_outside_the_vocabulary_is_a_state_that_was_lost():
    lives = [thinker(name, output=(0, 2, 0, 2), policy=ALWAYS) for name in "abc"]
    hook = prepared(lives, host_hook(ALWAYS))
    _, report = step(hook, lives, tokens=torch.tensor([0, VOCAB, -1]))
    assert not report.failures
    assert hook.open.tolist() == [True, False, False]
    assert step(hook, lives)[0] == [5, -1, -1]


def test_a_state_that_is_lost_behind_a_boundary_says_nothing_of_it():
    live = thinker("a", output=(0, 2, 0), policy=ALWAYS)
    live.options = replace(live.options, policy=replace(ALWAYS, patience=2))
    hook = prepared([live], host_hook(ALWAYS))
    step(hook, [live])
    assert step(hook, [live])[0] == [-1]  # one boundary of the two that are asked for
    forced, report = step(hook, [live], tokens=torch.tensor([-1]))
    assert (forced, report.exits) == ([-1], [])


def test_an_id_that_is_used_again_stands_where_the_new_request_stands():
    lives = [thinker(name, output=(0, 2, 0, 2), policy=ALWAYS) for name in "ab"]
    hook = prepared(lives, host_hook(ALWAYS))
    step(hook, lives)
    hook.finish(["a"])
    hook.admit("a", lives[0].prompt, replace(lives[0].options, exits=False))
    step(hook, lives)
    assert hook.open.tolist() == [False, True]


def faulty(fault):
    """Plants a failure in what turns rows into signals."""
    hook = host_hook(ALWAYS)
    signals = hook._rule._signals

    def planted(scalars, hidden, aux):
        found = signals(scalars, hidden, aux)
        bad = [row[0] == BAD for row in hidden]
        if fault == "raises" and any(bad):
            raise ArithmeticError("planted")
        if fault == "shape" and any(bad):
            return found[:-1]
        if fault == "together" and len(found) > 1:
            raise ArithmeticError("too many rows")
        return found

    hook._rule._signals = planted
    return hook


@pytest.mark.parametrize("fault", ["raises", "shape", "nan"])
def test_a_failure_is_the_requests_own(fault, caplog):
    lives = [thinker(name, output=(3, 0, 2), policy=ALWAYS) for name in "abc"]
    hook = prepared(lives, faulty(fault))
    hidden = rows_of([window(live, 1) for live in lives]).hidden
    hidden[1] = torch.nan if fault == "nan" else BAD
    forced, report = step(hook, lives, hidden=hidden)
    assert forced == [5, -1, 5]
    assert [request_id for request_id, _ in report.failures] == ["b"]
    assert hook.open.tolist() == [True, False, True]
    assert len(caplog.records) == 1
    _, report = step(hook, lives)
    assert not report.failures


def test_a_failure_that_is_nobodys_alone_is_that_of_all_who_were_looked_at():
    lives = [thinker("a", output=(3, 0), policy=ALWAYS), thinker("b", output=(3, 0), policy=ALWAYS)]
    lives.append(thinker("c", output=(0, 2), policy=ALWAYS))
    hook = prepared(lives, faulty("together"))
    _, report = step(hook, lives)
    assert [request_id for request_id, _ in report.failures] == ["a", "b"]
    assert hook._num_raised == 1
    assert step(hook, lives)[0] == [-1, -1, 5]


def test_logits_that_are_nan_end_the_exits_of_their_request_alone():
    lives = [thinker(name, output=(0, 0, 2, 0, 2), policy=ALWAYS) for name in ("broken", "sound")]
    hook = prepared(lives, host_hook(ALWAYS))
    logits = rows_of([window(live, 1) for live in lives]).logits
    logits[0] = torch.nan
    failures = [request_id for request_id, _ in step(hook, lives, logits=logits)[1].failures]
    assert hook.open.tolist() == [True, True]  # the head is asked at the next boundary
    for _ in range(3):
        failures += [request_id for request_id, _ in step(hook, lives)[1].failures]
    assert failures == ["broken"]
    assert hook.open.tolist() == [False, True]


def test_rows_that_do_not_fit_fail_as_a_whole():
    lives = [thinker(name, output=(0, 2), policy=ALWAYS) for name in "ab"]
    hook = prepared(lives, host_hook(ALWAYS))
    _, report = step(hook, lives, hidden=torch.zeros(1, HIDDEN))
    assert [request_id for request_id, _ in report.failures] == ["a", "b"]
    assert "2 tokens, but rows of {'hidden': 1}" in report.failures[0][1]


def test_missing_layers_are_named():
    live = thinker("a", output=(0, 2), policy=ALWAYS)
    hook = prepared([live], host_hook(ALWAYS))
    assert "target_aux" in step(hook, [live], aux=None)[1].failures[0][1]


def test_without_a_head_the_entropy_is_enough():
    policy = replace(LINES, thresholds={"entropy": 1e9}, min_thinking_tokens=0)
    live = thinker("a", output=(0, 2, 0), policy=policy)
    hook = without_head(policy, **ONE_ROW)
    assert isinstance(hook._rule, HostRule)
    prepared([live], hook)
    step(hook, [live])
    assert step(hook, [live])[0] == [5]


def test_logits_by_hand():
    rows = torch.tensor([[1.0, 2.0, 4.0], [-torch.inf, 0.0, 0.0]])
    with np.errstate(all="ignore"):
        logits = _Logits.of(rows)
        assert logits.shifted[0].tolist() == [-3.0, -2.0, 0.0]
        assert [logits.total(row) for row in (0, 1)] == pytest.approx([0.16984, 0.693147], abs=1e-5)
        assert logits.entropy(1) == pytest.approx(0.693147, abs=1e-5)
        assert math.isnan(_Logits.of(rows * torch.nan).total(0))
    assert rows[0, 0] == 1.0

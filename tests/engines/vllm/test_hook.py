"""The exit hook against a tracker that sees one token per step, under any scheduling."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.exit.tracker import ExitTracker
from ace_learn.features.spec import FeatureSpec
from ace_learn.testing import check_policy
from tests.engines.vllm.hook_world import (
    BODY,
    POLICY,
    Live,
    Options,
    Schedule,
    make_hook,
    new_live,
    reference,
    rows_of,
    window,
)

SCORE = ExitPolicy(
    predicate="score",
    score=ScoreModel(signals=("progress", "entropy"), weights=(2.0, -1.0), bias=0.3, threshold=0.4),
    ewma=0.6,
)
ANY = replace(POLICY, predicate="any", smooth_over="boundaries", patience=2)
EAGER = replace(POLICY, thresholds={"confidence": -1.0, "remaining": 1e9}, min_thinking_tokens=0)


def many(count, seed=3, body=BODY, **options):
    draw = random.Random(seed)
    return [new_live(str(i), draw, Options(**options), body=body) for i in range(count)]


def compare(schedule, lives):
    """Every kept row forces what the reference forces, with its smoothed signals; returns the number of exits."""
    exits = 0
    for live in lives:
        base, found = len(live.prompt), schedule.forced[live.request_id]
        expected = reference(live)
        assert [found[base + i] for i in range(len(expected))] == [token for token, *_ in expected]
        for i, (_, smoothed, _, _) in enumerate(expected):
            kept = schedule.smoothed[live.request_id][base + i]
            if kept is not None:
                torch.testing.assert_close(kept, smoothed, atol=1e-4, rtol=1e-4, equal_nan=True)
        fired = [i for i, (token, *_) in enumerate(expected) if token == 5]
        events = {event.position: event for event in schedule.events if event.request_id == live.request_id}
        assert set(events) == {base + i for i in fired}
        for i in fired:
            event = events[base + i]
            assert event.forced
            assert (event.tokens_thought, event.paragraphs) == expected[i][2:]
            assert list(event.signals) == pytest.approx(expected[i][1].tolist(), abs=1e-3, nan_ok=True)
        exits += len(fired)
    return exits


@pytest.mark.parametrize(("policy", "lag"), [(POLICY, 0), (POLICY, 2), (ANY, 2), (SCORE, 1)])
def test_any_schedule_gives_what_one_token_per_step_gives(policy, lag):
    lives = many(16, policy=policy)
    hook = make_hook(policy)
    schedule = Schedule(hook, lives, seed=1, lag=lag).run()
    assert compare(schedule, lives) >= 7
    assert schedule.preemptions > 5
    assert not schedule.failures
    assert hook.num_followed == 0


def test_slots_grow_with_the_requests_and_are_used_again():
    lives = many(50, policy=EAGER)
    hook = make_hook(EAGER)
    schedule = Schedule(hook, lives, seed=2, at_once=40).run()
    assert compare(schedule, lives) > 25
    assert len(hook._rule.table.settings) == 64


class OneRowLate(ExitHook):
    def observe(self, rows):
        forced = super().observe(rows)
        return None if forced is None else forced.roll(1)


class RowAbove(ExitHook):
    def observe(self, rows):
        return super().observe(rows._replace(hidden=rows.hidden.roll(1, 0)))


class TokenAbove(ExitHook):
    def observe(self, rows):
        return super().observe(rows._replace(tokens=rows.tokens.roll(1)))


@pytest.mark.parametrize("planted", [OneRowLate, RowAbove, TokenAbove])
def test_a_row_that_is_off_by_one_is_found(planted):
    lives = many(12)
    schedule = Schedule(make_hook(kind=planted), lives, seed=1).run()
    with pytest.raises(AssertionError):
        compare(schedule, lives)


def test_requests_of_one_batch_have_their_own_bounds():
    policies = [
        POLICY,
        replace(POLICY, thresholds={"remaining": 30.0, "confidence": 0.3}),
        replace(POLICY, patience=2),
        replace(POLICY, min_thinking_tokens=15),
        EAGER,
    ]
    draw = random.Random(5)
    lives = [new_live(str(i), draw, Options(policy=policies[i % len(policies)])) for i in range(20)]
    schedule = Schedule(make_hook(), lives, seed=4).run()
    assert compare(schedule, lives) >= 10
    alike = [replace(live, at=0, options=Options(policy=POLICY)) for live in lives]
    with pytest.raises(AssertionError):
        compare(schedule, alike)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.lists(st.sampled_from(BODY), min_size=1, max_size=25))
def test_exits_hang_on_the_prefix_alone(first, second, body):
    output = [4, *body, 2, 0, 2]
    found = []
    for seed in (first, second):
        lives = [Live("x", [0, 7], output, Options(policy=EAGER)), *many(2, seed, policy=EAGER)]
        schedule = Schedule(make_hook(EAGER), lives, seed, lag=seed % 3).run()
        found.append((schedule.forced["x"], [event[2:] for event in schedule.events if event.request_id == "x"]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], abs=1e-4, nan_ok=True)


def prepared(lives, hook=None, *, reports=True):
    """A hook that has seen the last token of every prompt."""
    hook = hook or make_hook(EAGER)
    for live in lives:
        hook.admit(live.request_id, live.prompt, live.options)
        live.at = len(live.prompt) - 1
    hook.observe(rows_of([window(live, 1) for live in lives]))
    if reports:
        hook.report()
    for live in lives:
        live.at += 1
    return hook


def thinker(request_id="x", output=(0, 2, 0, 2, 0), **options):
    return Live(request_id, [7, 4], list(output), Options(**{"policy": EAGER, **options}))


def test_hand_worked_step():
    live = thinker()
    hook = prepared([live])
    forced = hook.observe(rows_of([window(live, 4)]))
    assert forced.tolist() == [-1, 5, 6, -1]  # behind the break; then the rest of the think end, once
    (event,) = hook.report().exits
    assert event[:5] == ("x", 1, 3, 2, 1)
    assert event.forced


def test_shadow_mode_records_and_forces_nothing():
    shadowed, other = thinker("s", shadow=True), thinker("o")
    hook = prepared([shadowed, other])
    forced = hook.observe(rows_of([window(shadowed, 2), window(other, 2)]))
    assert forced.tolist() == [-1, -1, -1, 5]
    assert [(event.request_id, event.row, event.forced) for event in hook.report().exits] == [
        ("s", 1, False),
        ("o", 1, True),
    ]


def test_where_all_are_shadowed_nothing_can_be_forced():
    shadowed = thinker("s", shadow=True)
    hook = prepared([shadowed])
    assert hook.observe(rows_of([window(shadowed, 2)])) is None
    assert [event.forced for event in hook.report().exits] == [False]


def test_a_forbidden_think_end_is_not_forced_and_the_rule_fires_again():
    live = thinker()
    hook = prepared([live])
    allowed = torch.tensor([[True, True], [False, True], [True, True], [True, True], [True, True]])
    forced = hook.observe(rows_of([window(live, 5)], allowed=allowed))
    assert forced.tolist() == [-1, -1, -1, 5, 6]
    report = hook.report()
    assert report.blocked == [("x", 1)]
    assert [event.row for event in report.exits] == [3]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([0, 4], Options(exits=False)),
        ([0, 4, 2, 5, 6, 2], Options(policy=EAGER)),  # the template closed the block
        ([0, 4], Options(policy=None)),
    ],
)
def test_requests_without_exits_cost_nothing(prompt, options):
    hook = make_hook(EAGER)
    hook.admit("x", prompt, options)
    rows = rows_of([("x", len(prompt) - 1, [prompt])])
    assert hook.observe(rows._replace(hidden=None, logits=None)) is None
    assert hook.report() == ([], [], [], False)
    assert hook.num_followed == 0


def test_a_policy_that_never_exits_follows_nobody():
    hook = make_hook(ExitPolicy.never())
    hook.admit("x", [0, 4], Options(policy=ExitPolicy.never()))
    assert hook.num_followed == 0


def test_behind_the_thinking_the_head_is_not_asked():
    calls = []

    class Counting:
        def __call__(self, scalars, candidates, hidden):
            calls.append(scalars.shape[1])
            return torch.zeros(*scalars.shape[:2], 4)

    live = thinker(output=[0, 5, 6, *[7] * 60])
    hook = prepared([live], make_hook(EAGER, signaller=Counting()))
    rows = []
    while not live.done:
        hook.observe(rows_of([window(live, 1)]))
        hook.report()
        rows.append(live.at)
        live.at += 1
    settled = 16  # positions behind which no step in flight can take the think end back
    assert len(calls) == 1 + 3 + settled + 1 - 1
    assert len(rows) > 2 * settled


def test_a_head_that_reads_no_scalars_costs_no_softmax():
    spec = FeatureSpec(sources=("target_last",), hidden_size=6, aux_layers=())

    class Confident:
        def __call__(self, scalars, candidates, hidden):
            thought = scalars[..., 0] > 0
            assert bool(scalars[thought][:, 2:].isnan().all())
            return torch.ones(*scalars.shape[:2], 4)

    hook = make_hook(EAGER, signaller=Confident(), spec=spec)
    assert not hook.reads_logits
    assert not hook.reads_aux
    live = thinker()
    prepared([live], hook)
    rows = rows_of([window(live, 2)])
    forced = hook.observe(rows._replace(logits=torch.full_like(rows.logits, torch.nan), aux=None))
    assert forced.tolist() == [-1, 5]


@pytest.mark.parametrize("followed", [("a", "b", "c"), ("b",)])
def test_counts_on_the_device_give_the_same(followed):
    def run(**changes):
        lives = [thinker(name, exits=name in followed) for name in "abc"]
        hook = prepared(lives)
        sizes = [2, 4, 1]
        rows = rows_of([window(live, size) for live, size in zip(lives, sizes, strict=True)])
        forced = hook.observe(rows._replace(**changes))
        return forced.tolist(), hook.report()

    host = run()
    device = run(counts=np.array([4, 2, 1]), starts=torch.tensor([0, 2, 6, 7]))
    assert repr(host) == repr(device)  # NaN is not equal to itself
    assert 5 in host[0]


class HookTracker(ExitTracker):
    """The hook in the place of the tracker, for streams whose signals stand in the hidden states."""

    def __init__(self, *, markers, tables, policy, signaller, num_slots, window, device, candidates=None):
        super().__init__(
            markers=markers,
            tables=tables,
            policy=policy,
            signaller=signaller,
            num_slots=num_slots,
            window=window,
            device=device,
        )
        self.hook = ExitHook(
            markers=markers,
            tables=tables,
            policy=policy,
            signaller=lambda scalars, candidates, hidden: hidden.last,
            spec=FeatureSpec(sources=("target_last",), hidden_size=4, aux_layers=()),
            token_logits=lambda tokens, hidden: hidden.sum(-1),
            device=device,
            num_draft_tokens=8,
        )

    def admit(self, slots, prompt_length, *, in_think, armed, contracts=()):
        super().admit(slots, prompt_length, in_think=in_think, armed=armed)
        for slot in slots.tolist():
            self.hook.admit(str(slot), [0], Options(policy=self.policy))

    def observe(self, slots, rows):
        verdict = super().observe(slots, rows)
        flat = rows_of([(str(slot), 0, [[0]] * rows.tokens.shape[1]) for slot in slots.tolist()])
        forced = self.hook.observe(
            flat._replace(
                tokens=rows.tokens.flatten(),
                positions=rows.positions.flatten(),
                hidden=rows.hidden.last.flatten(0, 1),
            )
        )
        self.hook.report()
        return verdict._replace(forced=forced.view(rows.tokens.shape))


LEARNED_SCORE = replace(SCORE, score=replace(SCORE.score, signals=("progress",), weights=(2.0,)))


@pytest.mark.parametrize("policy", [POLICY, ANY, LEARNED_SCORE])
def test_the_laws_of_policies_hold(policy):
    check_policy(policy, tracker=HookTracker)


def test_what_a_runner_cannot_give_is_refused():
    candidates = FeatureSpec(sources=("target_last", "candidates"), hidden_size=6, aux_layers=())
    with pytest.raises(ValueError, match="reads candidates, which the vLLM plugin cannot give"):
        make_hook(spec=candidates)
    stated = ExitPolicy(predicate="any", thresholds={"agreement": 2.0})
    with pytest.raises(ValueError, match="candidate_present"):
        make_hook(stated)
    with pytest.raises(ValueError, match="name a head folder"):
        ExitHook(
            markers=make_hook()._markers,
            tables=make_hook()._rule._step._judge.machine.tables,
            policy=POLICY,
            signaller=None,
            spec=None,
            token_logits=lambda tokens, hidden: hidden.sum(-1),
            device=torch.device("cpu"),
            num_draft_tokens=0,
        )


def test_rows_that_a_runner_could_not_read_cost_the_exits_of_their_step_alone():
    one, other = thinker("one"), thinker("other")
    hook = prepared([one, other])
    hook.abandon(["one"], AttributeError("no such buffer"))
    assert hook.thinking is None
    assert hook.report().failures == [("one", "AttributeError: no such buffer")]
    forced = hook.observe(rows_of([window(one, 2), window(other, 2)]))
    assert forced.tolist() == [-1, -1, -1, 5]
    assert not hook.report().failures

"""The compiled step against the same slow reference. With the tests of vLLM, since these run without the import hook
that checks shapes, which cannot be compiled."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.engines.vllm.hook_world import HIDDEN, POLICY, Schedule, make_hook, rows_of, window
from tests.engines.vllm.test_hook import ANY, compare, many, prepared, thinker

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def compiled_hook(policy, num_draft_tokens=2):
    hook = make_hook(policy, num_draft_tokens=num_draft_tokens, compiled=True, num_requests=40)
    hook.warm_up(rows_of([("", 0, [[0], [0, 0]])]).tensors())
    return hook


@pytest.fixture(scope="module")
def hooks():
    return {policy.predicate: compiled_hook(policy) for policy in (POLICY, ANY)}


@pytest.mark.parametrize(("policy", "at_once"), [(POLICY, 40), (ANY, 3)])
def test_one_graph_per_hook_gives_what_one_token_per_step_gives(hooks, policy, at_once):
    before = counters["stats"]["unique_graphs"]
    lives = many(50, policy=policy)
    schedule = Schedule(hooks[policy.predicate], lives, seed=2, at_once=at_once, num_draft_tokens=2).run()
    assert compare(schedule, lives) >= 15
    assert not schedule.failures
    assert counters["stats"]["unique_graphs"] == before


def test_without_drafts_a_step_is_a_row_of_each():
    lives = many(20, policy=POLICY)
    schedule = Schedule(compiled_hook(POLICY, num_draft_tokens=0), lives, seed=2, at_once=3, num_draft_tokens=0).run()
    assert compare(schedule, lives) >= 5


def test_a_grammar_is_part_of_the_graph(hooks):
    policy = replace(POLICY, thresholds={"confidence": -1.0, "remaining": 1e9}, min_thinking_tokens=0)
    before = counters["stats"]["unique_graphs"]
    lives = [thinker("one", policy=policy), thinker("other", policy=policy)]
    hook = prepared(lives, hooks["all"])
    parts = [window(live, 3) for live in lives]
    allowed = torch.tensor([[True, True], [False, True], [True, True], *[[True, True]] * 3])
    forced = hook.observe(rows_of(parts, allowed=allowed))
    assert forced.tolist() == [-1, -1, -1, -1, 5, 6]
    report = hook.report()
    assert (report.blocked, [event.request_id for event in report.exits]) == ([("one", 1)], ["other"])
    assert counters["stats"]["unique_graphs"] == before
    hook.finish(["one", "other"])


def test_a_state_that_is_nan_costs_its_own_request_alone(hooks):
    policy = replace(POLICY, thresholds={"confidence": -1.0, "remaining": 1e9}, min_thinking_tokens=0)
    lives = [thinker("broken", policy=policy), thinker("sound", policy=policy)]
    hook = prepared(lives, hooks["all"])
    rows = rows_of([window(live, 1) for live in lives])
    hook.observe(rows._replace(hidden=torch.stack([torch.full((HIDDEN,), torch.nan), rows.hidden[1]])))
    for live in lives:
        live.at += 1
    forced = hook.observe(rows_of([window(live, 2) for live in lives]))
    assert forced.tolist() == [-1, -1, 5, 6]
    hook.report()
    assert [request_id for request_id, _ in hook.report().failures] == ["broken"]
    hook.finish(["broken", "sound"])


def test_rows_of_another_form_are_a_failure_and_not_wrong_answers(hooks):
    live = thinker("x", policy=POLICY)
    hook = prepared([live], hooks["all"])
    rows = rows_of([window(live, 1)])
    assert hook.observe(rows._replace(logits=rows.logits.double())) is None
    assert "compiled for" in hook.report().failures[0][1]
    hook.finish(["x"])

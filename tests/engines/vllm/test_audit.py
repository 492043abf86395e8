"""Which events count, and what a record says."""

import json
import math

import pytest

from ace_learn.contracts import Contract
from ace_learn.engines.follower import FollowRules
from ace_learn.engines.vllm.answer import RequestFollower, TokenEffects
from ace_learn.engines.vllm.audit import Audit, portable
from ace_learn.engines.vllm.events import ExitEvent
from ace_learn.engines.vllm.options import RequestOptions
from ace_learn.exit.policy import ExitPolicy
from ace_learn.signals import SIGNALS
from ace_learn.speculation.window import FinishLimits
from ace_learn.thinking import ThinkMarkers

WORDS = ["<think>", "</think>", "a", ".\n\n", "Answer: ", "B", "\n", "<eos>"]
OPEN, CLOSE, WORD, BREAK, CUE, LETTER, LINE, EOS = range(len(WORDS))
POLICY = ExitPolicy(predicate="all", thresholds={"consistency": 0.9})
CHOICE = Contract.from_spec({"kind": "choice", "options": ["A", "B"]})


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def started(*, contract=CHOICE, shadow=False, budget=None, cap=100):
    limits = FinishLimits(stop_ids=frozenset([EOS]), max_new_tokens=cap, context_room=1000)
    rules = FollowRules(
        markers=ThinkMarkers((OPEN,), (CLOSE,)), decode=decode, limits=limits, contract=contract, stop=()
    )
    options = RequestOptions(exits=True, shadow=shadow, policy=POLICY, certified=True, contract=contract)
    return RequestFollower((WORD, OPEN), rules, TokenEffects(decode)), Audit(options, budget=budget)


def fired(row, *, forced=True, tokens=2, paragraphs=1):
    values = dict.fromkeys(SIGNALS, math.nan) | {"consistency": 0.95, "remaining": 3.0}
    return ExitEvent("r", row, 99, tokens, paragraphs, tuple(values[name] for name in SIGNALS), forced)


def run(follower, audit, steps):
    """Each step: tokens, and the events of its rows."""
    for tokens, events in steps:
        before = follower.length
        finish = follower.push(tokens, num_drafted=4)
        audit.see(events, before=before, sampled=len(tokens))
        if finish is not None:
            return audit.record(follower, finish_reason=finish.reason, hook_off=False)
    raise AssertionError("the request goes on")


def test_an_exit_inside_an_accepted_window():
    """Row 2's input is the break at output 1; the forced think end stands behind it, at output 2."""
    follower, audit = started()
    record = run(follower, audit, [([WORD], []), ([BREAK, CLOSE], [fired(1)]), ([CUE, LETTER, LINE, WORD, WORD], [])])
    assert record == {
        "exit_position": 2,
        "reason": "policy",
        "signals": {"consistency": 0.95, "remaining": 3.0},
        "thresholds": {"consistency": 0.9},
        "paragraphs": 1,
        "tokens_thought": 2,
        "think_tokens": 2,
        "certified": True,
        "budget": None,
        "answer": "B",
        "contract_valid": True,
        "commit_position": 5,
        "cut": 0,
        "tokens": 5,
        "surplus": 0,
        "finish_reason": "contract",
        "spec": {"verify_steps": 3, "drafted": 12, "accepted": 3},
        "blocked": 0,
        "kl": 0.0,
        "hook_failures": [],
        "hook_off": False,
    }
    json.dumps(record, allow_nan=False)


def test_a_row_behind_a_rejected_draft_did_not_happen():
    """Three tokens were sampled, so rows 0 to 2 were kept; row 3 read a draft that was rejected."""
    follower, audit = started()
    steps = [([WORD, BREAK, WORD], [fired(3)]), ([BREAK, CLOSE], [fired(1, tokens=4, paragraphs=2)]), ([EOS], [])]
    record = run(follower, audit, steps)
    assert (record["reason"], record["exit_position"], record["tokens_thought"]) == ("policy", 4, 4)


def test_a_forced_row_whose_token_another_rule_took_is_no_exit():
    """The event says that the think end is forced behind row 0, and something else stands there."""
    follower, audit = started()
    record = run(follower, audit, [([BREAK, WORD], []), ([WORD], [fired(0)]), ([CLOSE, EOS], [])])
    assert (record["reason"], record["exit_position"]) == ("natural", 3)


def test_an_exit_that_came_to_nothing_does_not_hide_a_later_one():
    follower, audit = started()
    steps = [([BREAK, WORD], []), ([WORD], [fired(0)]), ([BREAK, CLOSE, EOS], [fired(1, tokens=4)])]
    record = run(follower, audit, steps)
    assert (record["reason"], record["exit_position"], record["tokens_thought"]) == ("policy", 4, 4)


def test_an_exit_beyond_the_trim_is_none():
    """A contract that reads the thinking commits before the row that fired."""
    anywhere = Contract.from_spec({"kind": "choice", "options": ["A", "B"], "scope": "anywhere"})
    follower, audit = started(contract=anywhere)
    record = run(follower, audit, [([CUE, LETTER, LINE, BREAK, CLOSE], [fired(4)])])
    assert (record["reason"], record["exit_position"], record["tokens"]) == ("none", None, 2)
    assert record["commit_position"] == 2


def test_shadow_records_the_first_row_that_would_have_fired():
    follower, audit = started(shadow=True)
    events = [fired(1, forced=False)]
    steps = [([WORD], []), ([BREAK, WORD], events), ([CLOSE], [fired(0, forced=False, tokens=3)]), ([EOS], [])]
    record = run(follower, audit, steps)
    assert (record["reason"], record["exit_position"], record["tokens_thought"]) == ("shadow", 2, 2)
    assert record["think_tokens"] == 3


def test_rows_that_a_grammar_blocked_are_counted_where_they_were_kept():
    follower, audit = started()
    follower.push([WORD, BREAK])
    audit.see([], before=0, sampled=2, blocked=[1, 2])
    record = run(follower, audit, [([CLOSE, EOS], [])])
    assert (record["blocked"], record["reason"]) == (1, "natural")


@pytest.mark.parametrize(
    ("budget", "cap", "tokens", "reason"),
    [
        (3, 100, [WORD, WORD, WORD, CLOSE, EOS], "budget"),
        (4, 100, [WORD, WORD, WORD, CLOSE, EOS], "natural"),
        (None, 100, [WORD, CLOSE, EOS], "natural"),
        (None, 3, [WORD, WORD, WORD], "length"),
        (None, 100, [WORD, EOS], "none"),
    ],
)
def test_why_thinking_ended(budget, cap, tokens, reason):
    follower, audit = started(budget=budget, cap=cap)
    record = run(follower, audit, [(tokens, [])])
    assert (record["reason"], record["budget"]) == (reason, budget)


def test_failures_are_told_and_a_missed_contract_is_not_valid():
    follower, audit = started()
    audit.fail("the head gave NaN")
    record = run(follower, audit, [([CLOSE, WORD, EOS], [])])
    assert record["hook_failures"] == ["the head gave NaN"]
    assert (record["answer"], record["contract_valid"], record["commit_position"]) == (None, False, None)


def test_an_answer_travels_whatever_it_holds():
    big = 2**70
    assert portable({"a": [big, -(2**63), True, 1.5]}) == {"a": [str(big), -(2**63), True, 1.5]}

"""Failures of multi-token steps that were seen in real engines, each at every size of window."""

import pytest

from ace_learn.contracts import Contract
from ace_learn.engines.live import LiveRequest
from ace_learn.engines.requests import Request
from tests.engines.test_live import CLOSE, LETTER, OPEN, SINGLE, TARGETS, ids, outcome

CUTS = pytest.mark.parametrize("size", [1, 2, 3, 5, 64])


def finished(tokens, size, **options):
    """The output of a request whose thinking is open, fed in windows of one size."""
    live = LiveRequest(Request(key=0, prompt_ids=(9, OPEN), **options), TARGETS[SINGLE])
    at = 0
    while live.finish is None:
        window = tokens[at : at + size]
        assert window, "the tokens do not end the request"
        live.push(window, [-float(at + i) for i in range(len(window))], num_accepted=len(window) - 1)
        at += len(window)
    return live.output()


@CUTS
def test_nothing_stands_behind_a_stop_string_in_ids_logprobs_and_text(size):
    tokens = ids("</think>", "a", ".", "a", "b", "b", "b", "b")
    output = finished(tokens, size, stop=("a.",))
    assert output.token_ids == tuple(tokens[:3])
    assert output.logprobs == (0.0, -1.0, -2.0)
    assert (output.finish_reason, output.answer_text) == ("stop", "")


@CUTS
def test_a_stop_before_the_cap_is_a_stop_though_the_window_reaches_over_the_cap(size):
    output = finished([CLOSE, *ids("a", "<eos>", "b", "b", "b")], size, max_new_tokens=5)
    assert (len(output.token_ids), output.finish_reason) == (3, "stop")


@CUTS
def test_a_stop_string_that_ends_early_in_a_long_accepted_run_is_found(size):
    output = finished([CLOSE, *ids("b", "a", "."), *ids("b") * 60], size, stop=("a.",))
    assert (len(output.token_ids), output.answer_text) == (4, "b")


@CUTS
@pytest.mark.parametrize("cap", [1, 3, 4])
def test_thinking_tokens_end_with_the_request(size, cap):
    output = finished(ids(*"abcd", "</think>", "a", "a"), size, max_new_tokens=cap)
    assert (output.think_tokens, len(output.token_ids), output.think_end) == (cap, cap, None)


@CUTS
def test_thinking_tokens_do_not_grow_with_what_follows_the_commit(size):
    tokens = ids("c", "c", "</think>", " sum", " is", " ", "a", ".", " ", "<think>", "c", "c")
    output = finished(tokens, size, contract=Contract.from_spec(LETTER))
    assert (output.answer, output.think_tokens, len(output.token_ids)) == ("a", 2, 7)


@CUTS
def test_a_stop_that_min_tokens_hides_inside_the_window_hides_no_later_one(size):
    output = finished(ids("</think>", "a", "<eos>", "b", "<eos>", "c"), size, min_tokens=3)
    assert (len(output.token_ids), output.finish_reason) == (5, "stop")


@CUTS
def test_a_stop_token_in_the_thinking_leaves_an_answer(size):
    request = Request(key=0, prompt_ids=(9, OPEN), contract=Contract.from_spec(LETTER))
    tokens = ids("c", "<eos>", " sum", " is", " ", "a", ".", " ", "b")
    token_ids, answer, reason, *_ = outcome(TARGETS[SINGLE], request, tokens, [size])
    assert (answer, reason) == ("a", "contract")
    assert token_ids == (*ids("c"), CLOSE, *ids(" sum", " is", " ", "a"))

"""Finish window: the vectors of DESIGN 7 and the orders of conditions around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.speculation.window import Finish, FinishLimits, finish_window

STOP = 9


def limits(max_new_tokens=100, context_room=100, min_tokens=0):
    return FinishLimits(
        stop_ids=frozenset({STOP}), max_new_tokens=max_new_tokens, context_room=context_room, min_tokens=min_tokens
    )


def test_a_stop_inside_the_window_beats_the_cap_behind_it():
    window = [10, 11, STOP, 20, 21, 22]
    assert finish_window(window, before=0, limits=limits(5)) == Finish(3, "stop")


def test_a_stop_beyond_the_cap_is_a_length_finish_at_the_cap():
    assert finish_window([10, 11, 12, STOP], before=0, limits=limits(3)) == Finish(3, "length")


def test_at_the_same_position_the_specific_beats_the_cap():
    assert finish_window([10, 11, STOP], before=0, limits=limits(3)) == Finish(3, "stop")
    assert finish_window([10, 11, 12], before=0, limits=limits(3), committed=3) == Finish(3, "contract")
    assert finish_window([10, STOP], before=0, limits=limits(), committed=2) == Finish(2, "contract")
    assert finish_window([10, 11], before=0, limits=limits(2, 2)) == Finish(2, "length")


def test_min_tokens_hides_stops_before_it():
    assert finish_window([STOP, 1, STOP], before=0, limits=limits(min_tokens=2)) == Finish(3, "stop")
    assert finish_window([STOP, 1], before=0, limits=limits(min_tokens=2)) is None
    assert finish_window([1, 2], before=4, limits=limits(min_tokens=6), stop_string=5) is None


def test_a_commit_or_stop_string_may_end_before_the_window():
    assert finish_window([1, 2], before=7, limits=limits(), committed=6) == Finish(6, "contract")
    assert finish_window([1, STOP], before=7, limits=limits(), stop_string=7) == Finish(7, "stop")


def test_caps_count_from_the_first_output_token():
    assert finish_window([1, 2, 3], before=4, limits=limits(6)) == Finish(6, "length")
    assert finish_window([1, 2, 3], before=4, limits=limits(9, 5)) == Finish(5, "context")
    assert finish_window([1, 2, 3], before=4, limits=limits(), answer_cap=6) == Finish(6, "length")
    assert finish_window([1, 2, 3], before=4, limits=limits(8)) is None


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="max_new_tokens"):
        limits(0)
    with pytest.raises(ValueError, match="shorten the prompt"):
        limits(5, 0)


@given(st.lists(st.integers(8, 12), min_size=1, max_size=12), st.integers(1, 14), st.integers(0, 6))
def test_cutting_the_window_does_not_change_the_finish(tokens, cap, minimum):
    """One window of N tokens finishes where N windows of one token do."""
    bounds = limits(cap, 20, minimum)
    whole = finish_window(tokens, before=0, limits=bounds)
    single = next(
        (f for i, t in enumerate(tokens) if (f := finish_window([t], before=i, limits=bounds)) is not None), None
    )
    assert whole == single

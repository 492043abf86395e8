import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ace_learn.evaluate import replay as module
from ace_learn.evaluate.replay import exit_scores, first_fire, held, replay, replay_no_think, threshold_exits
from ace_learn.evaluate.traces import Traces
from tests.evaluate.synthetic import make_traces
from tests.evaluate.test_traces import hand_rows


def test_replay_by_hand():
    traces = Traces.from_rows(hand_rows())
    early = replay(traces, np.array([0, 0]))
    assert early.tokens.tolist() == [17, 18]
    assert early.think_tokens.tolist() == [10, 10]
    assert early.lost_correct.tolist() == [False, True]  # problem 2 was wrong anyway
    assert early.mismatch.tolist() == [True, True]
    natural = replay(traces, np.array([1, 3]))
    assert natural.tokens.tolist() == [20, 38]
    assert not natural.lost_correct.any()
    assert not natural.mismatch.any()
    grid = replay(traces, np.array([[0, 0], [1, 1], [1, 2]]))
    assert grid.tokens.tolist() == [[17, 18], [20, 28], [20, 40]]
    assert grid.valid.tolist() == [[True, True], [True, True], [True, False]]
    assert grid.at(1).tokens.tolist() == [20, 28]


def test_a_null_full_answer_is_no_mismatch_at_the_natural_end_but_is_one_before_it():
    row = hand_rows()[0] | {"full_answer": None, "full_correct": False, "probe_matches": [False] * 3}
    traces = Traces.from_rows([row])
    assert replay(traces, np.array([[3], [2]])).mismatch.tolist() == [[False], [True]]


@pytest.mark.parametrize("index", [[-1, 0], [2, 0], [0, 4]])
def test_replay_refuses_exits_outside_the_trace(index):
    with pytest.raises(ValueError, match="exit_index"):
        replay(Traces.from_rows(hand_rows()), np.array(index))


def test_no_think():
    result = replay_no_think(Traces.from_rows(hand_rows()))
    assert result.tokens.tolist() == [20, 20]
    assert result.think_tokens.tolist() == [0, 0]
    assert result.lost_correct.tolist() == [False, True]
    assert result.mismatch.tolist() == [False, True]


def slow_exit(score, threshold, boundary, *, patience, minimum):
    """The exit rule as the state machine runs it, one boundary at a time."""
    holding = 0
    for index, (value, position) in enumerate(zip(score, boundary, strict=True)):
        if position < 0:
            return index
        holding = holding + 1 if value > threshold else 0
        if holding >= patience and position + 1 >= minimum:
            return index
    return len(boundary)


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("minimum", [0, 30])
def test_thresholds_and_fires_equal_the_slow_rule(monkeypatch, patience, minimum):
    monkeypatch.setattr(module, "_CHUNK_CELLS", 1500)  # several chunks
    traces = make_traces(60, seed=3)
    rng = np.random.default_rng(0)
    score = rng.random(traces.boundary.shape)
    score[0, 0] = np.nan
    thresholds = np.array([0.9, 0.5, 0.2, -1.0])
    folded = exit_scores(score, traces, patience=patience, min_thinking_tokens=minimum)
    fast = threshold_exits(folded, thresholds, traces.num_boundaries)
    fires = held(score > thresholds[:, None, None], patience) & (traces.boundary + 1 >= minimum)
    np.testing.assert_array_equal(fast, first_fire(fires, traces.num_boundaries))
    slow = [
        [slow_exit(score[i], tau, traces.boundary[i], patience=patience, minimum=minimum) for i in range(60)]
        for tau in thresholds
    ]
    assert fast.tolist() == slow


def test_first_fire_ignores_padding():
    fires = np.array([[False, False, True], [False, True, True]])
    assert first_fire(fires, np.array([2, 3])).tolist() == [2, 1]
    assert first_fire(np.zeros((2, 0), dtype=bool), np.array([0, 0])).tolist() == [0, 0]


def test_patience_longer_than_the_trace_never_fires():
    assert not held(np.ones((1, 3), dtype=bool), 4).any()
    assert held(np.ones((1, 3), dtype=bool), 3).tolist() == [[False, False, True]]


SCORES = hnp.arrays(np.float64, (7, 11), elements=st.floats(0, 1, width=16))


@settings(max_examples=60, deadline=None)
@given(score=SCORES, low=st.floats(0, 1), high=st.floats(0, 1), patience=st.integers(1, 4), minimum=st.integers(0, 90))
def test_higher_thresholds_patience_and_minimum_never_exit_earlier(score, low, high, patience, minimum):
    traces = make_traces(7, seed=1)
    score = score[:, : traces.num_columns]
    grid = np.array(sorted([low, high]))

    def exits(patience, minimum):
        folded = exit_scores(score, traces, patience=patience, min_thinking_tokens=minimum)
        return threshold_exits(folded, grid, traces.num_boundaries)

    here = exits(patience, minimum)
    assert (here >= 0).all()
    assert (here <= traces.num_boundaries).all()
    assert (here[1] >= here[0]).all()
    assert (exits(patience + 1, minimum) >= here).all()
    assert (exits(patience, minimum + 10) >= here).all()
    thought = replay(traces, here).think_tokens
    assert (thought[1] >= thought[0]).all()

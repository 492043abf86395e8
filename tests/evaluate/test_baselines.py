import numpy as np
import pytest

from ace_learn.evaluate.baselines import BASELINES, Budget, Confidence, NoThink, Oracle
from ace_learn.evaluate.compare import METHODS
from ace_learn.evaluate.metrics import savings_of
from ace_learn.evaluate.replay import replay
from ace_learn.evaluate.traces import Traces
from tests.evaluate.synthetic import make_traces
from tests.evaluate.test_traces import hand_rows


def test_names_are_those_of_the_table():
    assert list(BASELINES) == ["full", "no_think", "oracle", "budget", "confidence"]
    assert METHODS == ("full", "no_think", "budget", "confidence", "learned", "oracle")
    assert all(cls.name == name for name, cls in BASELINES.items())


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_gives_results_for_its_whole_grid(name):
    traces, baseline = make_traces(40), BASELINES[name]()
    grid = baseline.grid(traces, 12)
    assert 1 <= len(grid) <= 13
    result = baseline.replay(traces, grid)
    assert all(field.shape == (len(grid), 40) for field in result)
    if baseline.tuned:
        assert (np.diff(grid) < 0).all()
        assert (np.diff(savings_of(result, traces)) >= -0.02).all()  # from the safest to the greediest


def test_budget_by_hand():
    traces = Traces.from_rows(hand_rows())  # boundaries after 10 tokens; after 10, 20 and 30
    result = Budget().replay(traces, np.array([0.0, 10.0, 11.0, 20.0, 21.0, 31.0]))
    assert result.think_tokens.tolist() == [[10, 10], [10, 10], [12, 20], [12, 20], [12, 30], [12, 30]]
    assert result.tokens[-1].tolist() == [20, 38]  # nothing reaches 31: the natural ends


def test_budget_curve_goes_from_full_to_the_first_boundary():
    traces = make_traces(60)
    curve = Budget().curve(traces, 20)
    np.testing.assert_array_equal(curve.tokens[0], traces.full_tokens)
    np.testing.assert_array_equal(curve.tokens[-1], traces.tokens_at[:, 0])


def test_confidence_by_hand():
    traces = Traces.from_rows(hand_rows())  # confidences 0.25; 0.5, 0.75, 1.0
    result = Confidence().replay(traces, np.array([0.2, 0.5, 0.75, 1.0]))
    assert result.think_tokens.tolist() == [[10, 10], [12, 20], [12, 30], [12, 30]]
    assert result.tokens[-1].tolist() == [20, 38]  # above 1.0 there is nothing


def test_oracle_exits_at_the_first_match():
    traces = make_traces(60)
    expected = replay(traces, traces.first)
    got = Oracle().replay(traces, Oracle().grid(traces, 1)).at(0)
    for field, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(field, other)
    assert not got.mismatch.any()


def test_full_is_the_natural_end():
    traces = make_traces(60)
    full = BASELINES["full"]()
    result = full.replay(traces, full.grid(traces, 1)).at(0)
    np.testing.assert_array_equal(result.tokens, traces.full_tokens)
    assert not result.lost_correct.any()


def test_no_think_repeats_the_stored_run():
    traces = make_traces(20)
    result = NoThink().replay(traces, np.zeros(3))
    assert result.tokens.shape == (3, 20)
    assert (result.tokens == 6).all()
    assert (result.think_tokens == 0).all()


def test_traces_without_boundaries_run_to_their_end():
    lists = ("boundary", "probe_answer", "probe_matches", "probe_correct", "probe_tokens", "boundary_confidence")
    row = hand_rows()[0] | {name: [] for name in lists} | {"first": 0, "stable": 0}
    traces = Traces.from_rows([row])
    assert Confidence().grid(traces, 10).size == 0
    assert Budget().curve(traces, 10).tokens.tolist() == [[38], [38]]

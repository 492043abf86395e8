import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from ace_learn.evaluate.baselines import Budget
from ace_learn.evaluate.bootstrap import Bootstrap, Interval, lower_bound, percentile_interval
from ace_learn.evaluate.metrics import (
    LatencyModel,
    accuracy_difference,
    against_budgets,
    answer_times,
    captured_savings,
    interpolate_rows,
    json_of,
    mcnemar,
    row_intervals,
    savings_difference,
    savings_of,
    summarise,
)
from ace_learn.evaluate.replay import Replayed, replay
from ace_learn.evaluate.traces import Traces
from tests.evaluate.synthetic import make_traces
from tests.evaluate.test_traces import hand_rows

LATENCY = LatencyModel(prefill_s=0.5, per_token_s=0.01)


def replayed(*, tokens, correct):
    tokens, correct = np.array(tokens), np.array(correct, dtype=bool)
    return Replayed(tokens, tokens, np.ones_like(correct), correct, correct, ~correct, ~correct)


def test_summary_by_hand():
    traces = Traces.from_rows(hand_rows())
    row = summarise("early", replay(traces, np.array([0, 1])), traces, LATENCY)
    # tokens 17 + 28 = 45; full 20 + 38 = 58; oracle exits problem 2 at its natural end and problem 4 at boundary 1: 48
    assert row.tokens_mean == 22.5
    assert row.think_tokens_mean == 15.0
    assert row.captured_savings == pytest.approx(13 / 10)
    assert row.accuracy == 0.5
    assert row.lost_correct == 0.0
    assert row.lost_correct_ucb95 == pytest.approx(1 - 0.05**0.5)
    assert row.time_to_valid_answer_s == pytest.approx(0.5 + 0.01 * 22.5)
    assert row.valid_answers_per_s == pytest.approx(1 / 0.725)
    # problem 4 answers nothing at boundary 2: its time to a valid answer does not exist, its seconds are still spent
    row = summarise("silent", replay(traces, np.array([1, 2])), traces, LATENCY)
    assert row.time_to_valid_answer_s == pytest.approx(0.5 + 0.01 * 20)
    assert row.valid_answers_per_s == pytest.approx(0.5 / (0.5 + 0.01 * 30))
    assert row.lost_correct == 0.5


def test_upper_bound_is_clopper_pearson():
    traces = make_traces(300)
    row = summarise("first", replay(traces, np.zeros(300, dtype=np.int64)), traces, LATENCY)
    lost = round(row.lost_correct * 300)
    assert row.lost_correct_ucb95 == pytest.approx(beta.ppf(0.95, lost + 1, 300 - lost))


def test_full_captures_nothing_and_oracle_everything():
    traces = make_traces(50)
    both = replay(traces, np.stack([traces.num_boundaries, traces.first]))
    np.testing.assert_allclose(savings_of(both, traces), [0.0, 1.0])
    assert savings_of(both.at(1), traces) == pytest.approx(1.0)


def test_a_figure_that_does_not_exist_is_null():
    rows = [hand_rows()[1]]  # no boundary matches: the oracle saves nothing
    traces = Traces.from_rows(rows)
    silent = replay(traces, traces.num_boundaries)._replace(valid=np.array([False]))
    row = summarise("full", silent, traces, LATENCY).to_json()
    assert row["captured_savings"] is None
    assert row["time_to_valid_answer_s"] is None
    assert row["valid_answers_per_s"] == 0.0
    assert np.isnan(captured_savings(3.0, 4.0, 4.0))
    assert json_of({"pair": Interval(0.5, float("nan")), "n": 3}) == {"pair": [0.5, None], "n": 3}


def test_mcnemar_by_hand():
    first = replayed(tokens=[1] * 6, correct=[1, 1, 1, 1, 0, 1])
    second = replayed(tokens=[1] * 6, correct=[0, 0, 0, 0, 1, 1])
    result = mcnemar(first, second)
    assert (result.only_first, result.only_second) == (4, 1)
    assert result.p_value == pytest.approx(2 * (5 + 1) / 32)  # P(Bin(5, 1/2) >= 4) on both sides
    assert mcnemar(first, first).p_value == 1.0


def test_bootstrap_equals_the_slow_loop_and_is_seeded():
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(50, 3))
    sums = Bootstrap(replicates=20, seed=4).sums(columns)
    generator = np.random.default_rng(4)
    slow = [columns[generator.integers(0, 50, (1, 50))[0]].sum(axis=0) for _ in range(20)]
    np.testing.assert_allclose(sums, slow)
    np.testing.assert_array_equal(sums, Bootstrap(replicates=20, seed=4).sums(columns))
    assert not np.array_equal(sums, Bootstrap(replicates=20, seed=5).sums(columns))


def test_bootstrap_does_not_depend_on_its_chunks(monkeypatch):
    columns = np.random.default_rng(0).normal(size=(50, 2))
    whole = Bootstrap(replicates=33, seed=1).sums(columns)
    monkeypatch.setattr("ace_learn.evaluate.bootstrap._CHUNK_CELLS", 200)
    np.testing.assert_allclose(whole, Bootstrap(replicates=33, seed=1).sums(columns), rtol=1e-12)


def test_bootstrap_interval_covers():
    """A 95% interval of a mean covers it in 88-99% of 300 samples (of 200 problems; odds of a miss < 1e-4)."""
    rng = np.random.default_rng(1)
    hits = 0
    for repeat in range(300):
        sample = (rng.random((200, 1)) < 0.3).astype(float)
        interval = percentile_interval(Bootstrap(replicates=300, seed=repeat).sums(sample)[:, 0] / 200)
        hits += interval.low <= 0.3 <= interval.high
    assert 0.88 * 300 <= hits <= 0.99 * 300


def test_percentiles():
    values = np.arange(101.0)
    assert percentile_interval(values) == pytest.approx((2.5, 97.5))
    assert lower_bound(values) == pytest.approx(5.0)
    assert percentile_interval(np.append(values, np.nan)) == pytest.approx((2.5, 97.5))
    assert np.isnan(percentile_interval(np.full(3, np.nan)).low)


def test_interpolation_by_hand():
    # through (0, 0), (10, 1), (20, 0), given out of order; beyond the ends it is constant
    xp, fp = np.array([[10.0, 0.0, 20.0]]), np.array([[1.0, 0.0, 0.0]])
    for x, y in [(-1, 0), (0, 0), (5, 0.5), (10, 1), (15, 0.5), (20, 0), (30, 0)]:
        assert interpolate_rows(np.array([float(x)]), xp, fp)[0] == pytest.approx(y)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), ties=st.booleans())
def test_interpolation_equals_numpy_row_by_row(seed, ties):
    rng = np.random.default_rng(seed)
    xp = rng.integers(0, 6, (5, 7)).astype(float) if ties else rng.random((5, 7))
    fp = xp**2 if ties else rng.random((5, 7))  # at ties, values that agree
    x = rng.uniform(-1, 7, 5) if ties else rng.uniform(-0.2, 1.2, 5)
    slow = [np.interp(x[i], np.sort(xp[i]), fp[i][np.argsort(xp[i])]) for i in range(5)]
    np.testing.assert_allclose(interpolate_rows(x, xp, fp), slow, atol=1e-12)


def test_against_budgets_by_hand():
    budgets = Replayed(*(np.stack(pair) for pair in zip(
        replayed(tokens=[10] * 4, correct=[0, 0, 0, 1]), replayed(tokens=[30] * 4, correct=[1, 1, 1, 1]), strict=True
    )))  # fmt: skip
    method = replayed(tokens=[10, 10, 20, 20], correct=[1, 1, 1, 1])
    result = against_budgets(method, budgets, Bootstrap(replicates=50))
    assert result.tokens_mean == 15.0
    assert result.budget_accuracy == pytest.approx(0.25 + 0.75 * 5 / 20)
    assert result.difference == pytest.approx(1 - 0.4375)


def test_against_budgets_redoes_the_interpolation_in_every_resample():
    traces = make_traces(120, seed=2)
    rng = np.random.default_rng(0)
    method = replay(traces, rng.integers(0, traces.num_boundaries + 1))
    budgets = Budget().curve(traces, 8)
    bootstrap = Bootstrap(replicates=60, seed=3)
    generator = np.random.default_rng(3)
    drawn = generator.integers(0, 120, (60, 120))
    differences = []
    for rows in drawn:
        tokens, accuracy = budgets.tokens[:, rows].mean(axis=1), budgets.correct[:, rows].mean(axis=1)
        order = np.argsort(tokens, kind="stable")
        at_equal_tokens = np.interp(method.tokens[rows].mean(), tokens[order], accuracy[order])
        differences.append(method.correct[rows].mean() - at_equal_tokens)
    result = against_budgets(method, budgets, bootstrap)
    assert result.lower_bound == pytest.approx(np.quantile(differences, 0.05), abs=1e-9)


def test_a_budget_does_not_beat_the_budget_curve():
    traces = make_traces(300, seed=5)
    budgets = Budget().curve(traces, 30)
    result = against_budgets(budgets.at(12), budgets, Bootstrap(replicates=200))
    assert result.difference == pytest.approx(0.0, abs=1e-9)
    assert result.lower_bound <= 1e-9


def test_paired_differences():
    traces = make_traces(200, seed=6)
    full, oracle = replay(traces, traces.num_boundaries), replay(traces, traces.first)
    gain = savings_difference(oracle, full, traces, Bootstrap(replicates=100))
    assert gain.estimate == pytest.approx(1.0)
    assert gain.interval == pytest.approx((1.0, 1.0))
    assert accuracy_difference(full, oracle, Bootstrap(replicates=100)).estimate == pytest.approx(0.0)
    intervals = row_intervals(full, traces, Bootstrap(replicates=400))
    assert intervals.accuracy.low < full.correct.mean() < intervals.accuracy.high
    assert intervals.captured_savings == Interval(0.0, 0.0)


def test_the_latency_model_by_hand():
    # T = P + c (tau + delta) + C_A = 0.5 + 0.01 * (100 + 5) + 0.25
    assert LATENCY.seconds(np.array([100]), late=5, answer_s=0.25) == pytest.approx([1.8])
    assert LATENCY.seconds(np.array([100, 0])) == pytest.approx([1.5, 0.5])
    assert LATENCY.seconds(np.array([100, 0]), late=np.array([0, 7])) == pytest.approx([1.5, 0.57])


@given(st.floats(0, 1), st.floats(1e-4, 1), st.lists(st.integers(1, 1000), min_size=2, max_size=9, unique=True))
def test_the_latency_model_is_found_again_in_what_it_says(prefill_s, per_token_s, tokens):
    model = LatencyModel(prefill_s=prefill_s, per_token_s=per_token_s)
    fitted = LatencyModel.fit(tokens, model.seconds(np.array(tokens)).tolist())
    assert fitted.per_token_s == pytest.approx(per_token_s, rel=1e-6, abs=1e-9)
    assert fitted.prefill_s == pytest.approx(prefill_s, abs=1e-6)


def test_a_fit_to_one_length_has_no_prefill_and_none_is_below_zero():
    assert LatencyModel.fit([4, 4], [1.0, 3.0]) == (0.0, 0.5)
    assert LatencyModel.fit([1, 2], [1.0, 3.0]) == (0.0, pytest.approx(2.0))


def test_answer_times_by_hand():
    seconds, valid = np.array([1.0, 2.0, 6.0]), np.array([True, True, False])
    times = answer_times(seconds, valid, np.array([True, False, False]), elapsed_s=4.0)
    assert times == (1.5, 0.5, 4.0)
    none = np.zeros(3, dtype=bool)
    times = answer_times(seconds, none, none, elapsed_s=4.0)
    assert np.isnan(times.time_to_valid_answer_s)
    assert times.valid_answers_per_s == 0.0
    assert np.isnan(times.engine_seconds_per_solved)

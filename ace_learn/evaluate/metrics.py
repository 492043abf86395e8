"""The figures of the result table, their intervals, and the paired comparisons between methods."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.stats import binomtest

from ace_learn.artifacts import JSON
from ace_learn.evaluate.bootstrap import Bootstrap, Interval, lower_bound, percentile_interval
from ace_learn.evaluate.calibration import upper_bound
from ace_learn.evaluate.replay import Replayed, replay
from ace_learn.evaluate.traces import Traces


class LatencyModel(NamedTuple):
    """T = P + c (tau + delta) + C_A, seconds from a request's start to its committed answer; P and c are measured.

    Attributes:
        prefill_s: P, seconds from the request's start to its first token.
        per_token_s: c, seconds per output token.
    """

    prefill_s: float
    per_token_s: float

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> Self:
        """The line through measured runs: output tokens, and seconds to the last of them."""
        if min(tokens) == max(tokens):  # no line through one point
            return cls(prefill_s=0.0, per_token_s=float(np.mean(seconds)) / tokens[0])
        slope, intercept = np.polyfit(tokens, seconds, 1)
        return cls(prefill_s=max(0.0, float(intercept)), per_token_s=float(slope))

    def seconds(
        self,
        tokens: Int[ndarray, " n"],
        *,
        late: Int[ndarray, " n"] | int = 0,
        answer_s: Float[ndarray, " n"] | float = 0.0,
    ) -> Float[ndarray, " n"]:
        """Modelled seconds T of n runs.

        Args:
            tokens: tau, output tokens up to the one that settles the run's end: the commit, or the boundary at which
                thinking ends (then the answer's time goes into `answer_s`).
            late: delta, tokens decoded behind it before the engine acts on it.
            answer_s: C_A, seconds for what follows: an answer that is not among `tokens`, the contract's own work.
        """
        return np.asarray(self.prefill_s + self.per_token_s * (tokens + late) + answer_s, dtype=np.float64)


class AnswerTimes(NamedTuple):
    """How fast valid answers come; nan where there is none.

    Attributes:
        time_to_valid_answer_s: mean seconds from a request's start to the commit of its valid answer.
        valid_answers_per_s: valid answers / elapsed seconds.
        engine_seconds_per_solved: elapsed seconds / problems answered correctly.
    """

    time_to_valid_answer_s: float
    valid_answers_per_s: float
    engine_seconds_per_solved: float


def answer_times(
    seconds: Float[ndarray, " n"], valid: Bool[ndarray, " n"], correct: Bool[ndarray, " n"], *, elapsed_s: float
) -> AnswerTimes:
    """The three figures of n requests.

    Args:
        seconds: from each request's start to its end, which is the commit where there is one.
        valid: whether it has a valid answer.
        correct: whether that answer is right.
        elapsed_s: how long the engine was busy with all of them.
    """
    solved = int(correct.sum())
    return AnswerTimes(
        time_to_valid_answer_s=float(seconds[valid].mean()) if valid.any() else float("nan"),
        valid_answers_per_s=float(valid.sum()) / elapsed_s,
        engine_seconds_per_solved=elapsed_s / solved if solved else float("nan"),
    )


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One line of the result table; a figure that does not exist is nan and becomes null in JSON.

    Attributes:
        method: name of the method.
        n: problems.
        accuracy: share of problems answered correctly.
        think_tokens_mean: tokens thought per problem.
        tokens_mean: output tokens per problem, think and answer.
        captured_savings: (full - method) / (full - oracle), all output tokens, summed over problems.
        lost_correct: share of problems where the full answer is correct and this one is not.
        lost_correct_ucb95: one-sided exact 95% upper bound of that share.
        time_to_valid_answer_s: modelled mean seconds to the commit of a valid answer, over problems that have one.
        valid_answers_per_s: share of problems with a valid answer / mean modelled seconds per problem.
    """

    method: str
    n: int
    accuracy: float
    think_tokens_mean: float
    tokens_mean: float
    captured_savings: float
    lost_correct: float
    lost_correct_ucb95: float
    time_to_valid_answer_s: float
    valid_answers_per_s: float

    def to_json(self) -> dict[str, JSON]:
        """Plain JSON object."""
        return {name: _finite(value) for name, value in asdict(self).items()}


class RowIntervals(NamedTuple):
    """Bootstrap 95% intervals of a row."""

    accuracy: Interval
    captured_savings: Interval


class McNemar(NamedTuple):
    """Exact McNemar test of two methods on the same problems.

    Attributes:
        only_first: problems that only the first method solves.
        only_second: problems that only the second method solves.
        p_value: two-sided exact p-value.
    """

    only_first: int
    only_second: int
    p_value: float


class Difference(NamedTuple):
    """A paired difference, first method minus second, with its bootstrap 95% interval."""

    estimate: float
    interval: Interval


class BudgetComparison(NamedTuple):
    """A method against fixed budgets at equal mean tokens.

    Attributes:
        tokens_mean: the method's mean output tokens.
        accuracy: the method's accuracy.
        budget_accuracy: accuracy of the budget curve at that many tokens, linear between neighbouring budgets.
        difference: accuracy - budget_accuracy.
        lower_bound: paired one-sided 95% bootstrap lower bound of the difference, interpolation redone per resample.
    """

    tokens_mean: float
    accuracy: float
    budget_accuracy: float
    difference: float
    lower_bound: float


def captured_savings(
    tokens: Float[ndarray, "*k"] | float, full: Float[ndarray, "*k"] | float, oracle: Float[ndarray, "*k"] | float
) -> Float[ndarray, "*k"]:
    """(full - method) / (full - oracle) of summed (or mean) tokens; nan where the oracle saves nothing."""
    saved, possible = np.subtract(full, tokens, dtype=np.float64), np.subtract(full, oracle, dtype=np.float64)
    return np.asarray(np.divide(saved, possible, out=np.full(np.shape(saved), np.nan), where=possible > 0))


def savings_of(replayed: Replayed, traces: Traces) -> Float[ndarray, "*grid"]:
    """Captured savings of each grid point; 0 everywhere where the oracle saves nothing."""
    oracle = float(replay(traces, traces.first).tokens.sum())
    share = captured_savings(replayed.tokens.sum(axis=-1, dtype=np.float64), float(traces.full_tokens.sum()), oracle)
    return np.asarray(np.nan_to_num(share))


def summarise(method: str, replayed: Replayed, traces: Traces, latency: LatencyModel) -> MethodRow:
    """The figures of one method on n problems.

    Args:
        method: name in the table.
        replayed: its per-problem results, each `[n]`.
        traces: the same problems.
        latency: measured latency model.
    """
    n = traces.num_problems
    oracle = replay(traces, traces.first)
    seconds = latency.seconds(replayed.tokens)
    times = answer_times(seconds, replayed.valid, replayed.correct, elapsed_s=float(seconds.sum()))
    lost = int(replayed.lost_correct.sum())
    return MethodRow(
        method=method,
        n=n,
        accuracy=float(replayed.correct.mean()),
        think_tokens_mean=float(replayed.think_tokens.mean()),
        tokens_mean=float(replayed.tokens.mean()),
        captured_savings=float(
            captured_savings(float(replayed.tokens.sum()), float(traces.full_tokens.sum()), float(oracle.tokens.sum()))
        ),
        lost_correct=lost / n,
        lost_correct_ucb95=upper_bound(lost, n),
        time_to_valid_answer_s=times.time_to_valid_answer_s,
        valid_answers_per_s=times.valid_answers_per_s,
    )


def row_intervals(replayed: Replayed, traces: Traces, bootstrap: Bootstrap) -> RowIntervals:
    """Bootstrap 95% intervals of accuracy and captured savings."""
    oracle = replay(traces, traces.first)
    sums = bootstrap.sums(_columns(replayed.correct, replayed.tokens, traces.full_tokens, oracle.tokens))
    return RowIntervals(
        accuracy=percentile_interval(sums[:, 0] / traces.num_problems),
        captured_savings=percentile_interval(captured_savings(sums[:, 1], sums[:, 2], sums[:, 3])),
    )


def savings_difference(first: Replayed, second: Replayed, traces: Traces, bootstrap: Bootstrap) -> Difference:
    """Paired difference in captured savings, first method minus second."""
    oracle = replay(traces, traces.first)
    columns = _columns(first.tokens, second.tokens, traces.full_tokens, oracle.tokens)

    def statistic(sums: Float[ndarray, "k 4"]) -> Float[ndarray, " k"]:
        one, other = (captured_savings(sums[:, k], sums[:, 2], sums[:, 3]) for k in (0, 1))
        return np.asarray(one - other)

    estimate = float(statistic(columns.sum(axis=0, keepdims=True))[0])
    return Difference(estimate, percentile_interval(statistic(bootstrap.sums(columns))))


def accuracy_difference(first: Replayed, second: Replayed, bootstrap: Bootstrap) -> Difference:
    """Paired difference in accuracy, first method minus second."""
    gain = _columns(first.correct)[:, 0] - _columns(second.correct)[:, 0]
    values = bootstrap.sums(gain[:, None])[:, 0] / gain.shape[0]
    return Difference(float(gain.mean()), percentile_interval(values))


def mcnemar(first: Replayed, second: Replayed) -> McNemar:
    """Exact McNemar test on correctness."""
    only_first = int(np.sum(first.correct & ~second.correct))
    only_second = int(np.sum(~first.correct & second.correct))
    discordant = only_first + only_second
    p_value = float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_first, only_second, p_value)


def interpolate_rows(
    x: Float[ndarray, " R"], xp: Float[ndarray, "R G"], fp: Float[ndarray, "R G"]
) -> Float[ndarray, " R"]:
    """Row-wise `numpy.interp`: piecewise linear through (xp, fp), sorted by xp, constant beyond the ends."""
    order = np.argsort(xp, axis=1, kind="stable")
    xp, fp = np.take_along_axis(xp, order, axis=1), np.take_along_axis(fp, order, axis=1)
    right = np.clip(np.sum(xp <= x[:, None], axis=1), 1, xp.shape[1] - 1)
    rows = np.arange(x.shape[0])
    x0, x1, y0, y1 = xp[rows, right - 1], xp[rows, right], fp[rows, right - 1], fp[rows, right]
    width = x1 - x0
    weight = np.divide(x - x0, width, out=np.ones_like(width), where=width > 0)
    return np.asarray(y0 + np.clip(weight, 0, 1) * (y1 - y0))


def against_budgets(method: Replayed, budgets: Replayed, bootstrap: Bootstrap) -> BudgetComparison:
    """Compare a method with the curve of fixed budgets at equal mean output tokens, on the same problems.

    Args:
        method: per-problem results, each `[n]`.
        budgets: results of G >= 2 budgets, each `[G, n]`.
        bootstrap: resampling settings.
    """
    n, grid = method.tokens.shape[0], budgets.tokens.shape[0]
    assert grid >= 2, "a budget curve needs two budgets"
    columns = np.concatenate(
        [_columns(method.correct, method.tokens), budgets.correct.T.astype(np.float64), budgets.tokens.T], axis=1
    )

    def statistic(means: Float[ndarray, "k c"]) -> Float[ndarray, " k"]:
        return interpolate_rows(means[:, 1], means[:, 2 + grid :], means[:, 2 : 2 + grid])

    means = columns.mean(axis=0, keepdims=True)
    resampled = bootstrap.sums(columns) / n
    budget_accuracy = float(statistic(means)[0])
    return BudgetComparison(
        tokens_mean=float(means[0, 1]),
        accuracy=float(means[0, 0]),
        budget_accuracy=budget_accuracy,
        difference=float(means[0, 0]) - budget_accuracy,
        lower_bound=lower_bound(resampled[:, 0] - statistic(resampled)),
    )


def json_of(record: Mapping[str, object]) -> dict[str, JSON]:
    """Turn a flat record of numbers, texts and intervals into JSON; a number that does not exist becomes null."""
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: object) -> JSON:
    match value:
        case Interval():
            return [_finite(value.low), _finite(value.high)]
        case bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else None
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _columns(*arrays: ndarray) -> Float[ndarray, "n k"]:
    return np.stack([array.astype(np.float64) for array in arrays], axis=1)

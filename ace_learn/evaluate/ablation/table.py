"""Figures of all methods on the same problems, every difference from the reference paired on the same resamples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.artifacts import JSON
from ace_learn.evaluate.bootstrap import Bootstrap, Interval, percentile_interval
from ace_learn.evaluate.calibration import upper_bound
from ace_learn.evaluate.metrics import Difference, captured_savings, json_of
from ace_learn.evaluate.replay import Replayed, replay
from ace_learn.evaluate.traces import Traces


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One method on some problems; a figure that does not exist is nan and becomes null in JSON.

    Attributes:
        n: problems.
        accuracy: share of problems answered correctly.
        accuracy_interval: bootstrap 95% interval.
        think_tokens_mean: tokens thought per problem.
        tokens_mean: output tokens per problem, think and answer.
        captured_savings: (full - method) / (full - oracle), all output tokens, summed over problems.
        captured_savings_interval: bootstrap 95% interval.
        lost_correct: share of problems where the full answer is correct and this one is not.
        lost_correct_ucb95: one-sided exact 95% upper bound of that share.
        mismatch: share of problems that exit early with an answer other than the full one.
        savings_difference: captured savings minus the reference's, with the paired 95% interval.
        accuracy_difference: accuracy minus the reference's, with the paired 95% interval.
        adjusted_p: p-value of the savings difference, adjusted for all comparisons together; nan where the method takes
            no part in them.
    """

    n: int
    accuracy: float
    accuracy_interval: Interval
    think_tokens_mean: float
    tokens_mean: float
    captured_savings: float
    captured_savings_interval: Interval
    lost_correct: float
    lost_correct_ucb95: float
    mismatch: float
    savings_difference: Difference
    accuracy_difference: Difference
    adjusted_p: float

    @property
    def savings_differ(self) -> bool:
        """Whether the interval of the savings difference excludes 0."""
        interval = self.savings_difference.interval
        return bool(interval.low > 0 or interval.high < 0)

    def to_json(self) -> dict[str, JSON]:
        """A plain JSON object; a difference is an object of `estimate`, `interval` and `excludes_zero`."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        out: dict[str, JSON] = {}
        for name, value in plain.items():
            if isinstance(value, Difference):
                interval = value.interval
                excludes = bool(interval.low > 0 or interval.high < 0)
                out[name] = json_of({**value._asdict(), "excludes_zero": excludes})
            else:
                out |= json_of({name: value})
        return out


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All methods on the test split.

    Attributes:
        overall: figures on all problems, by method.
        families: the same for each family's problems, by family.
        comparisons: how many savings differences the adjusted p-values cover.
    """

    overall: dict[str, Figures]
    families: dict[str, dict[str, Figures]]
    comparisons: int


def measure(
    results: Mapping[str, Replayed], traces: Traces, *, reference: str, compared: Sequence[str], bootstrap: Bootstrap
) -> Measured:
    """Measure all methods, on all problems and on each family's.

    Args:
        results: results of each method on the n problems, each `[n]`.
        traces: the problems.
        reference: the method that the others are compared with.
        compared: the methods whose savings differences are judged together.
        bootstrap: resampling settings; the resamples are the same for all methods.
    """
    family = np.array(traces.family)
    families = {}
    for name in sorted(set(traces.family)):
        index = np.flatnonzero(family == name)
        part = {method: replayed.at(index) for method, replayed in results.items()}
        families[name] = _figures(part, traces.select(index), reference=reference, compared=(), bootstrap=bootstrap)
    overall = _figures(results, traces, reference=reference, compared=compared, bootstrap=bootstrap)
    return Measured(overall=overall, families=families, comparisons=len(compared))


def _figures(
    results: Mapping[str, Replayed], traces: Traces, *, reference: str, compared: Sequence[str], bootstrap: Bootstrap
) -> dict[str, Figures]:
    names, n = list(results), traces.num_problems
    count = len(names)
    base = names.index(reference)
    tokens = np.stack([results[name].tokens for name in names], axis=1).astype(np.float64)
    correct = np.stack([results[name].correct for name in names], axis=1).astype(np.float64)
    ends = np.stack([traces.full_tokens, replay(traces, traces.first).tokens], axis=1).astype(np.float64)
    columns = np.concatenate([tokens, correct, ends], axis=1)
    # Row 0 holds the problems themselves, the others their resamples.
    sums = np.concatenate([columns.sum(axis=0, keepdims=True), bootstrap.sums(columns)])
    full, oracle = (np.broadcast_to(sums[:, [column]], (len(sums), count)) for column in (-2, -1))
    savings, accuracy = captured_savings(sums[:, :count], full, oracle), sums[:, count : 2 * count] / n
    more, better = savings - savings[:, base : base + 1], accuracy - accuracy[:, base : base + 1]
    judged = [names.index(name) for name in compared]
    adjusted = np.full(count, np.nan)
    adjusted[judged] = adjusted_p_values(more[0, judged], more[1:, judged])
    return {
        name: _row(results[name], n, savings[:, k], accuracy[:, k], more[:, k], better[:, k], adjusted[k])
        for k, name in enumerate(names)
    }


def _row(
    replayed: Replayed,
    n: int,
    savings: Float[ndarray, " r"],
    accuracy: Float[ndarray, " r"],
    more: Float[ndarray, " r"],
    better: Float[ndarray, " r"],
    adjusted_p: float,
) -> Figures:
    lost = int(replayed.lost_correct.sum())
    return Figures(
        n=n,
        accuracy=float(accuracy[0]),
        accuracy_interval=percentile_interval(accuracy[1:]),
        think_tokens_mean=float(replayed.think_tokens.mean()),
        tokens_mean=float(replayed.tokens.mean()),
        captured_savings=float(savings[0]),
        captured_savings_interval=percentile_interval(savings[1:]),
        lost_correct=lost / n,
        lost_correct_ucb95=upper_bound(lost, n),
        mismatch=float(replayed.mismatch.mean()),
        savings_difference=Difference(float(more[0]), percentile_interval(more[1:])),
        accuracy_difference=Difference(float(better[0]), percentile_interval(better[1:])),
        adjusted_p=float(adjusted_p),
    )


def adjusted_p_values(estimate: Float[ndarray, " m"], resampled: Float[ndarray, "R m"]) -> Float[ndarray, " m"]:
    """Two-sided p-values of m differences, adjusted for all of them together by the maximum of their statistics.

    Single-step max-t of Westfall and Young (1993), as in Romano and Wolf (2005): each difference in units of its own
    bootstrap standard error is held against the largest of the m centred ones in each resample. Unlike Bonferroni's
    correction it loses little where the differences move together, as those of like policies do.

    Args:
        estimate: the differences.
        resampled: the same in R resamples, the same resamples for all; nan where one has no value.

    Returns:
        One p-value each, 1 for a difference that never varies (two policies with the same exits).
    """
    known = resampled[np.isfinite(resampled).all(axis=1)]
    if estimate.size == 0 or known.shape[0] == 0:
        return np.ones(estimate.shape)
    error = known.std(axis=0)
    varies = error > 0
    scale = np.where(varies, error, 1.0)
    largest = np.max(np.where(varies, np.abs(known - estimate) / scale, 0.0), axis=1)
    reached = np.sum(largest[:, None] >= np.abs(estimate) / scale, axis=0)
    return np.asarray(np.where(varies, (1 + reached) / (1 + known.shape[0]), 1.0))

"""All methods on the same held-out problems: result rows, intervals, curves and paired comparisons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int
from numpy import ndarray

from ace_learn.evaluate.baselines import BASELINES, Baseline, Budget
from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.calibration import CalibrationResult, Certificate
from ace_learn.evaluate.learned import Risk, at_point, certify, policy_exits
from ace_learn.evaluate.metrics import (
    BudgetComparison,
    Difference,
    LatencyModel,
    McNemar,
    MethodRow,
    RowIntervals,
    accuracy_difference,
    against_budgets,
    mcnemar,
    row_intervals,
    savings_difference,
    savings_of,
    summarise,
)
from ace_learn.evaluate.replay import Replayed, replay
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import ExitPolicy

METHODS = (*(name for name in BASELINES if name != "oracle"), "learned", "oracle")
"""Methods of the result table, in its order."""


class Splits(NamedTuple):
    """Traces of three splits: grids are fixed on the first, thresholds on the second, figures come from the third."""

    validation: Traces
    calibration: Traces
    test: Traces


class Curve(NamedTuple):
    """Mean output tokens and accuracy of one method along its thresholds."""

    tokens_mean: Float[ndarray, " G"]
    accuracy: Float[ndarray, " G"]


class Tuned(NamedTuple):
    """A baseline's threshold, None where nothing certifies, and the tests behind it."""

    threshold: float | None
    result: CalibrationResult


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the report shows.

    Attributes:
        rows: one line per method, in the order of `METHODS`.
        intervals: bootstrap 95% intervals by method.
        curves: accuracy over tokens of `budget`, `confidence` and, where there is a certificate, `learned`.
        tuned: certified thresholds of the baselines.
        policy: the learned policy.
        exit_index: the learned policy's exit of every test problem.
        against_budgets: learned policy against fixed budgets at equal mean tokens.
        against_full: difference in accuracy, learned minus full.
        against_full_mcnemar: learned (first) and full (second).
        best_scalar: the tuned baseline without a head that captures most.
        against_scalar: difference in captured savings, learned minus `best_scalar`.
    """

    rows: tuple[MethodRow, ...]
    intervals: Mapping[str, RowIntervals]
    curves: Mapping[str, Curve]
    tuned: Mapping[str, Tuned]
    policy: ExitPolicy
    exit_index: Int[ndarray, " n"]
    against_budgets: BudgetComparison
    against_full: Difference
    against_full_mcnemar: McNemar
    best_scalar: str
    against_scalar: Difference

    @property
    def scalar_is_as_good(self) -> bool:
        """Whether the data do not show that the learned policy captures more than the best scalar baseline."""
        return not self.against_scalar.interval.low > 0


def tune_baseline(baseline: Baseline, splits: Splits, *, risk: Risk, size: int = 60) -> Tuned:
    """Choose a baseline's threshold as a learned policy's: grid and order on validation, tests on calibration."""
    thresholds = baseline.grid(splits.validation, size)
    worth = savings_of(baseline.replay(splits.validation, thresholds), splits.validation)
    ordered = thresholds[np.argsort(worth, kind="stable")]
    ordered = ordered[np.sort(worth) > 0]
    result, _ = certify(baseline.replay(splits.calibration, ordered), splits.calibration, risk)
    return Tuned(None if result.chosen is None else float(ordered[result.chosen]), result)


def compare_methods(
    splits: Splits,
    policy: ExitPolicy,
    smoothed: Float32[ndarray, "n P S"],
    *,
    risk: Risk,
    latency: LatencyModel,
    bootstrap: Bootstrap,
) -> Evaluation:
    """Replay every method on the test split.

    Args:
        splits: traces.
        policy: the learned policy; a certificate gives its curve.
        smoothed: signals of the n test traces, smoothed as the policy says.
        risk: what the baselines are tuned to; the same as the policy's.
        latency: measured latency model.
        bootstrap: resampling settings.
    """
    test = splits.test
    tuned = {name: tune_baseline(cls(), splits, risk=risk) for name, cls in BASELINES.items() if cls.tuned}
    exits = policy_exits([policy], smoothed, test)[0]
    results = {name: baseline_results(cls(), tuned.get(name), test) for name, cls in BASELINES.items()}
    results["learned"] = replay(test, exits)
    rows = tuple(summarise(name, results[name], test, latency) for name in METHODS)
    scalar = max(tuned, key=lambda name: float(savings_of(results[name], test)))
    budgets = Budget().curve(test, 60)
    return Evaluation(
        rows=rows,
        intervals={name: row_intervals(results[name], test, bootstrap) for name in METHODS},
        curves=_curves(test, policy, smoothed, budgets),
        tuned=tuned,
        policy=policy,
        exit_index=exits,
        against_budgets=against_budgets(results["learned"], budgets, bootstrap),
        against_full=accuracy_difference(results["learned"], results["full"], bootstrap),
        against_full_mcnemar=mcnemar(results["learned"], results["full"]),
        best_scalar=scalar,
        against_scalar=savings_difference(results["learned"], results[scalar], test, bootstrap),
    )


def certified_policies(policy: ExitPolicy) -> tuple[ExitPolicy, ...]:
    """All policies along the grid of a policy's certificate, in test order; none without a certificate."""
    if policy.certificate is None:
        return ()
    return tuple(at_point(policy, point) for point in Certificate.from_json(policy.certificate).grid)


def baseline_results(baseline: Baseline, tuned: Tuned | None, test: Traces) -> Replayed:
    """Results of a baseline at its tuned threshold; one that certifies nothing thinks to the end.

    Args:
        baseline: the method.
        tuned: its threshold; None for a baseline that is not tuned.
        test: the problems.
    """
    if tuned is None:
        return baseline.replay(test, baseline.grid(test, 1)[:1]).at(0)
    if tuned.threshold is None:
        return replay(test, test.num_boundaries)
    return baseline.replay(test, np.full(1, tuned.threshold)).at(0)


def _curves(
    test: Traces, policy: ExitPolicy, smoothed: Float32[ndarray, "n P S"], budgets: Replayed
) -> dict[str, Curve]:
    confidence = BASELINES["confidence"]()
    curves = {
        "budget": _curve(budgets),
        "confidence": _curve(confidence.replay(test, np.append(np.inf, confidence.grid(test, 60)))),
    }
    policies = certified_policies(policy)
    if policies:
        curves["learned"] = _curve(replay(test, policy_exits(policies, smoothed, test)))
    return curves


def _curve(replayed: Replayed) -> Curve:
    return Curve(replayed.tokens.mean(axis=-1), replayed.correct.mean(axis=-1))

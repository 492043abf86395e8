"""Learned exit policies: candidates fixed on the validation split, one of them certified on the calibration split.

Everything that is chosen by looking at data (smoothing, patience, the score model, the grid and its order) is chosen on
the validation split. The calibration split is touched once, by `calibrate_policy`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from numpy import ndarray
from sklearn.linear_model import LogisticRegression

from ace_learn.artifacts import JSON
from ace_learn.evaluate.calibration import CalibrationResult, Certificate, Method, calibrate
from ace_learn.evaluate.metrics import savings_of
from ace_learn.evaluate.replay import Replayed, exit_scores, first_fire, held, replay, threshold_exits
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import SIGNALS, ExitPolicy, ScoreModel, SmoothOver

Loss = Literal["lost_correct", "mismatch"]

_DENSE_THRESHOLDS = 1024
"""Thresholds of the fine grid from which the candidates are thinned out."""

_PRODUCT_SIZE = 1300
"""About as many points as a product grid of thresholds has before it is pruned."""

GUARANTEES: dict[Method, str] = {
    "fixed_sequence": "with probability >= 1 - delta over the calibration problems, the risk is <= alpha",
    "bonferroni": "with probability >= 1 - delta over the calibration problems, the risk is <= alpha",
    "crc": "the risk is <= alpha in expectation over the calibration problems, not with high probability",
}


@dataclass(frozen=True, kw_only=True)
class PolicyFamily:
    """The candidates among which calibration may choose."""

    predicate: Literal["score", "all", "any"] = "score"
    """`score` (a logistic model over the signals), or `all` / `any` of their thresholds."""
    signals: tuple[str, ...] = SIGNALS
    """Which signals are read."""
    ewma: float = 1.0
    """Weight of the newest value in the moving average; 1 switches smoothing off."""
    smooth_over: SmoothOver = "boundaries"
    """What the moving average runs over."""
    patience: int = 1
    """Consecutive boundaries at which the predicate must hold."""
    min_thinking_tokens: int = 0
    """No exit before so many thought tokens."""
    grid_size: int = 60
    """At most so many candidates."""
    label: Literal["matches", "safe"] = "matches"
    """What the score model predicts at a boundary: the answer `matches` the full one, or exiting is `safe` (loses no
    correct answer)."""

    def __post_init__(self) -> None:
        """Refuses an empty subset or grid; `ExitPolicy` checks the rest."""
        if not self.signals or len(set(self.signals)) != len(self.signals):
            raise ValueError(f"name one or more of the signals {', '.join(SIGNALS)}, each once; got {self.signals}")
        if self.grid_size < 2:
            raise ValueError(f"grid_size must be at least 2, got {self.grid_size}")

    def policy(self, *, thresholds: dict[str, float] | None = None, score: ScoreModel | None = None) -> ExitPolicy:
        """A member of the family.

        Raises:
            ValueError: a value that no policy can have.
        """
        return ExitPolicy(
            predicate=self.predicate,
            thresholds=thresholds or {},
            score=score,
            ewma=self.ewma,
            smooth_over=self.smooth_over,
            patience=self.patience,
            min_thinking_tokens=self.min_thinking_tokens,
        )


class Candidates(NamedTuple):
    """Policies in the order in which they will be tested, and what fixed them."""

    policies: tuple[ExitPolicy, ...]
    order: str


@dataclass(frozen=True, kw_only=True)
class Risk:
    """What is to be certified."""

    loss: Loss = "lost_correct"
    """`lost_correct` (needs gold), or `mismatch` with the full answer (needs none)."""
    alpha: float = 0.02
    """Risk level: the share of problems that may be lost."""
    delta: float = 0.05
    """Admitted probability that the certificate is wrong; `crc` does not use it."""
    method: Method = "fixed_sequence"
    """Testing procedure."""

    def losses(self, replayed: Replayed) -> Bool[ndarray, "*grid n"]:
        """The loss of each problem."""
        return replayed.lost_correct if self.loss == "lost_correct" else replayed.mismatch


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a certificate holds for.

    Attributes:
        data_sha256: hash of the data set.
        model_fingerprint: fingerprint of the target.
        sampling: sampling parameters of the probes.
    """

    data_sha256: str
    model_fingerprint: str
    sampling: dict[str, JSON]


class CalibratedPolicy(NamedTuple):
    """Outcome of `calibrate_policy`.

    Attributes:
        policy: the certified policy with its certificate, or `never`.
        result: the tests; `result.message` explains the choice or the refusal.
        savings: captured savings of each candidate on the calibration split.
    """

    policy: ExitPolicy
    result: CalibrationResult
    savings: Float[ndarray, " G"]


def policy_exits(
    policies: Sequence[ExitPolicy], smoothed: Float32[ndarray, "n P S"], traces: Traces
) -> Int[ndarray, "G n"]:
    """Exit index of every trace under every policy.

    Args:
        policies: G policies that share the smoothing with which `smoothed` was made.
        smoothed: smoothed signals at the boundaries, nan on padding.
        traces: the n traces.
    """
    signals = torch.from_numpy(smoothed)
    thought = traces.boundary + 1
    out = np.empty((len(policies), traces.num_problems), dtype=np.int64)
    for row, policy in enumerate(policies):
        fires = held(policy.holds(signals).numpy(), policy.patience) & (thought >= policy.min_thinking_tokens)
        out[row] = first_fire(fires, traces.num_boundaries)
    return out


def build_candidates(
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], validation: Traces, loss: Loss = "lost_correct"
) -> Candidates:
    """Choose the candidate policies and their order on the validation split, safest first.

    Args:
        family: what the candidates have in common.
        smoothed: smoothed signals of the validation traces.
        validation: the validation traces.
        loss: the loss to be certified later; it prunes product grids.

    Returns:
        Candidates, none where the validation split cannot tell good boundaries from bad ones.
    """
    if family.predicate == "score":
        policies = _score_candidates(family, smoothed, validation)
        order = "score thresholds, evenly spaced in captured savings on the validation split, ascending"
    else:
        policies = _product_candidates(family, smoothed, validation, Risk(loss=loss))
        order = "Pareto front of savings and loss of a product grid on the validation split, by ascending savings"
    return Candidates(policies, order)


def fit_score_model(family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces) -> ScoreModel | None:
    """Fit P(label | smoothed signals) over all boundaries; None where only one label occurs. Its threshold is 0.5."""
    real = traces.is_boundary
    columns = [_score_input(smoothed[..., SIGNALS.index(name)][real], name) for name in family.signals]
    correct, matches = traces.correct_at[:, :-1], traces.matches_at[:, :-1]
    labels = (matches if family.label == "matches" else correct | ~traces.full_correct[:, None])[real]
    if labels.all() or not labels.any():
        return None
    features = np.stack(columns, axis=1).astype(np.float64)
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    model = LogisticRegression(C=100.0, max_iter=1000).fit((features - mean) / scale, labels)
    weights = np.asarray(model.coef_[0], dtype=np.float64) / scale
    return ScoreModel(
        signals=family.signals,
        weights=tuple(weights.tolist()),
        bias=float(model.intercept_[0]) - float(weights @ mean),
        threshold=0.5,
    )


def calibrate_policy(
    candidates: Candidates, smoothed: Float32[ndarray, "n P S"], calibration: Traces, *, risk: Risk, scope: Scope
) -> CalibratedPolicy:
    """Certify the candidates on the calibration split and return the certified one that saves most.

    Args:
        candidates: from `build_candidates`.
        smoothed: smoothed signals of the calibration traces, smoothed as the candidates say.
        calibration: the calibration traces.
        risk: what is to be certified.
        scope: what the certificate will hold for.
    """
    replayed = replay(calibration, policy_exits(candidates.policies, smoothed, calibration))
    result, savings = certify(replayed, calibration, risk)
    if result.chosen is None:
        return CalibratedPolicy(ExitPolicy.never(), result, savings)
    chosen = result.chosen
    certificate = Certificate(
        method=risk.method,
        guarantee=GUARANTEES[risk.method],
        loss=risk.loss,
        n=result.n,
        losses=int(result.losses[chosen]),
        alpha=risk.alpha,
        delta=risk.delta,
        p_value=float(result.p_values[chosen]),
        chosen=chosen,
        certified=tuple(result.certified.tolist()),
        grid=tuple(threshold_point(policy) for policy in candidates.policies),
        grid_order=candidates.order,
        data_sha256=scope.data_sha256,
        model_fingerprint=scope.model_fingerprint,
        sampling=scope.sampling,
    )
    policy = candidates.policies[chosen].with_certificate(certificate.to_json())
    return CalibratedPolicy(policy, result, savings)


def certify(replayed: Replayed, traces: Traces, risk: Risk) -> tuple[CalibrationResult, Float[ndarray, " G"]]:
    """Run the tests on replayed candidates `[G, n]` that are in test order.

    Raises:
        ValueError: the loss needs gold answers and a problem has none.
    """
    if risk.loss == "lost_correct" and not traces.has_gold.all():
        raise ValueError(
            f"{int((~traces.has_gold).sum())} of {traces.num_problems} problems have no gold answer, so nothing could "
            "count as lost there: certify the loss 'mismatch' instead"
        )
    savings = savings_of(replayed, traces)
    losses = risk.losses(replayed)
    return calibrate(losses, alpha=risk.alpha, delta=risk.delta, method=risk.method, savings=savings), savings


def threshold_point(policy: ExitPolicy) -> dict[str, float]:
    """The thresholds of a policy as a point of the grid; a score threshold is called `score`."""
    return {"score": policy.score.threshold} if policy.score is not None else dict(policy.thresholds)


def at_point(policy: ExitPolicy, point: dict[str, float]) -> ExitPolicy:
    """The policy with the thresholds of another point of its grid, and without a certificate."""
    if policy.score is not None:
        return replace(policy, score=replace(policy.score, threshold=point["score"]), certificate=None)
    return replace(policy, thresholds=dict(point), certificate=None)


def _score_input(values: Float32[ndarray, " m"], name: str) -> Float32[ndarray, " m"]:
    return np.log1p(values) if name == "remaining" else values


def _score_candidates(
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces
) -> tuple[ExitPolicy, ...]:
    model = fit_score_model(family, smoothed, traces)
    if model is None:
        return ()
    probability = model.probability(torch.from_numpy(smoothed)).numpy().astype(np.float64)
    score = exit_scores(probability, traces, patience=family.patience, min_thinking_tokens=family.min_thinking_tokens)
    observed = np.unique(score[np.isfinite(score)])
    if observed.size == 0:
        return ()
    dense = np.quantile(observed, np.linspace(1, 0, _DENSE_THRESHOLDS), method="nearest")
    thresholds = np.unique(np.append(dense, 0.0))[::-1]
    savings = savings_of(replay(traces, threshold_exits(score, thresholds, traces.num_boundaries)), traces)
    order = np.argsort(savings, kind="stable")
    chosen = order[_evenly(savings[order], family.grid_size)]
    return tuple(family.policy(score=replace(model, threshold=float(tau))) for tau in thresholds[chosen])


def _product_candidates(
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces, risk: Risk
) -> tuple[ExitPolicy, ...]:
    real = traces.is_boundary
    if not real.any():
        return ()
    count = family.grid_size if len(family.signals) == 1 else round(_PRODUCT_SIZE ** (1 / len(family.signals)))
    levels = np.linspace(0, 1, count + 2)[1:-1]
    axes = [np.unique(np.quantile(smoothed[..., SIGNALS.index(name)][real], levels)) for name in family.signals]
    policies = [
        family.policy(thresholds=dict(zip(family.signals, point, strict=True)))
        for point in itertools.product(*(axis.astype(np.float64).tolist() for axis in axes))
    ]
    replayed = replay(traces, policy_exits(policies, smoothed, traces))
    savings, losses = savings_of(replayed, traces), risk.losses(replayed).sum(axis=-1)
    front = pareto_front(savings, losses)
    return tuple(policies[i] for i in front[_evenly(savings[front], family.grid_size)])


def pareto_front(savings: Float[ndarray, " G"], losses: Int[ndarray, " G"]) -> Int[ndarray, " C"]:
    """Indices of the points with positive savings that no other point beats on both counts, by ascending savings."""
    order = np.lexsort((losses, -savings))
    best = np.minimum.accumulate(losses[order])
    previous = np.concatenate(([np.inf], best[:-1]))
    front = order[(losses[order] < previous) & (savings[order] > 0)]
    return front[::-1]


def _evenly(savings: Float[ndarray, " G"], size: int) -> Int[ndarray, " C"]:
    """Indices of at most `size` of the ascending savings, nearest to evenly spaced positive levels."""
    positive = np.flatnonzero(savings > 0)
    if positive.size == 0:
        return positive
    levels = np.linspace(savings[positive[0]], savings[positive[-1]], size)
    return np.unique(positive[np.abs(savings[positive] - levels[:, None]).argmin(axis=1)])

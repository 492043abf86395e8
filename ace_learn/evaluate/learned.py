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
from ace_learn.evaluate.calibration import CalibrationResult, Certificate, Method, calibrate, check_levels
from ace_learn.evaluate.metrics import savings_of
from ace_learn.evaluate.replay import Replayed, exit_scores, first_fire, held, replay, threshold_exits
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import ExitPolicy, ScoreModel, SmoothOver
from ace_learn.signals import BY_NAME, LEARNED, SIGNALS
from ace_learn.speculation.drafters import DraftStates

Loss = Literal["lost_correct", "mismatch"]

_DENSE_THRESHOLDS = 1024
"""Thresholds of the fine grid from which the candidates are thinned out."""

_PRODUCT_SIZE = 4096
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
    signals: tuple[str, ...] = LEARNED
    """Which signals are read: learned ones (confidence, progress, remaining, consistency) and derived ones
    (`ace_learn/signals`)."""
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
        """Refuses what no policy could have.

        Raises:
            ValueError: no, unknown or repeated signals, an empty grid, or a value that no policy can have.
        """
        known = set(self.signals) <= set(SIGNALS) and len(set(self.signals)) == len(self.signals)
        if not self.signals or not known:
            given = ", ".join(self.signals) or "none"
            raise ValueError(f"name one or more of the signals {', '.join(SIGNALS)}, each once; got {given}")
        if self.grid_size < 2:
            raise ValueError(f"grid_size must be at least 2, got {self.grid_size}")
        if self.predicate != "score" and self.label != "matches":
            raise ValueError(f"label is read by the predicate 'score' alone, and this one is {self.predicate!r}")
        ExitPolicy(
            predicate="never",
            ewma=self.ewma,
            smooth_over=self.smooth_over,
            patience=self.patience,
            min_thinking_tokens=self.min_thinking_tokens,
        )

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

    def __post_init__(self) -> None:
        """Refuses impossible levels.

        Raises:
            ValueError: a level outside (0, 1).
        """
        check_levels(self.alpha, self.delta)

    def losses(self, replayed: Replayed) -> Bool[ndarray, "*grid n"]:
        """The loss of each problem."""
        return replayed.lost_correct if self.loss == "lost_correct" else replayed.mismatch


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a certificate holds for.

    Attributes:
        data_sha256: hash of the data set.
        head_sha256: hash of the head's weights.
        model_fingerprint: fingerprint of the target.
        sampling: sampling parameters of the probes.
        draft: the drafter's states behind the data set's features; None: it holds none.
    """

    data_sha256: str
    head_sha256: str
    model_fingerprint: str
    sampling: dict[str, JSON]
    draft: DraftStates | None = None


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
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], validation: Traces, risk: Risk
) -> Candidates:
    """Choose the candidate policies and their order on the validation split, safest first.

    Args:
        family: what the candidates have in common.
        smoothed: smoothed signals of the validation traces.
        validation: the validation traces.
        risk: what is to be certified; the grid is finer where the validation risk is near its level.

    Returns:
        Candidates, none where the validation split cannot tell good boundaries from bad ones.
    """
    if family.predicate == "score":
        policies = _score_candidates(family, smoothed, validation, risk)
        order = "score thresholds by ascending captured savings on the validation split"
    else:
        policies = _product_candidates(family, smoothed, validation, risk)
        order = "frontier of a product grid in savings and losses on the validation split, by ascending savings"
    return Candidates(policies, order)


def fit_score_model(family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces) -> ScoreModel | None:
    """Fit P(label | smoothed signals) over all boundaries, on standardised inputs with scikit-learn's default penalty.

    Returns:
        The model in units of the signals, with threshold 0.5; None where only one label occurs.
    """
    real = traces.is_boundary
    columns = [_score_input(smoothed[..., SIGNALS.index(name)][real], name) for name in family.signals]
    correct, matches = traces.correct_at[:, :-1], traces.matches_at[:, :-1]
    labels = (matches if family.label == "matches" else correct | ~traces.full_correct[:, None])[real]
    if labels.all() or not labels.any():
        return None
    features = np.stack(columns, axis=1).astype(np.float64)
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    model = LogisticRegression(max_iter=1000).fit((features - mean) / scale, labels)
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
    policy = candidates.policies[chosen]
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
        head_sha256=scope.head_sha256,
        model_fingerprint=scope.model_fingerprint,
        sampling=scope.sampling,
        draft=scope.draft.to_json() if scope.draft is not None and "acceptance" in policy.signals else None,
    )
    return CalibratedPolicy(policy.with_certificate(certificate.to_json()), result, savings)


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
    return np.log1p(values) if BY_NAME[name].score_transform == "log1p" else values


def _score_candidates(
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces, risk: Risk
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
    replayed = replay(traces, threshold_exits(score, thresholds, traces.num_boundaries))
    chosen = spread(replayed, traces, risk, size=family.grid_size, boldness=1 - thresholds)
    return tuple(family.policy(score=replace(model, threshold=float(tau))) for tau in thresholds[chosen])


def _product_candidates(
    family: PolicyFamily, smoothed: Float32[ndarray, "n P S"], traces: Traces, risk: Risk
) -> tuple[ExitPolicy, ...]:
    real = traces.is_boundary
    if not real.any():
        return ()
    count = family.grid_size if len(family.signals) == 1 else round(_PRODUCT_SIZE ** (1 / len(family.signals)))
    axes = [_bounds(smoothed[..., SIGNALS.index(name)][real], name, family.predicate, count) for name in family.signals]
    policies = [
        family.policy(thresholds=dict(zip(family.signals, point, strict=True)))
        for point in itertools.product(*(axis.tolist() for axis in axes))
    ]
    replayed = replay(traces, policy_exits(policies, smoothed, traces))
    front = frontier(savings_of(replayed, traces), risk.losses(replayed).sum(axis=-1))
    flat = np.zeros(front.shape)
    kept = front[spread(replayed.at(front), traces, risk, size=family.grid_size, boldness=flat)]
    return tuple(policies[i] for i in kept)


def _bounds(
    values: Float32[ndarray, " m"], name: str, predicate: Literal["score", "all", "any"], count: int
) -> Float[ndarray, " C"]:
    """Quantiles of a signal to use as bounds, denser towards the strict end.

    They reach from a bound that (nearly) every boundary meets for `all`, where it switches the signal off, up to one
    that none meets for `any`, where that one does.
    """
    steps = np.arange(count) + (1 if predicate == "any" else 0)
    strictness = 1 - (1 - steps / count) ** 2
    levels = 1 - strictness if BY_NAME[name].falls else strictness
    return np.unique(np.quantile(values, levels)).astype(np.float64)


def frontier(savings: Float[ndarray, " G"], losses: Int[ndarray, " G"]) -> Int[ndarray, " C"]:
    """Indices of the distinct points with positive savings that lose no more than any that saves as much or more.

    By ascending savings. Unlike on a Pareto front, points that save less at equal loss stay: they are the safe steps by
    which a sequence of tests reaches the bold ones, and few validation problems cannot tell their losses apart.
    """
    _, distinct = np.unique(np.stack([savings, losses], axis=1), axis=0, return_index=True)
    order = distinct[np.lexsort((-losses[distinct], savings[distinct]))]
    least = np.minimum.accumulate(losses[order][::-1])[::-1]
    return np.asarray(order[(losses[order] <= least) & (savings[order] > 0)])


def spread(
    replayed: Replayed, traces: Traces, risk: Risk, *, size: int, boldness: Float[ndarray, " G"]
) -> Int[ndarray, " C"]:
    """Pick at most `size` candidates that save something, by ascending savings, spread along the curve.

    The spacing is even in savings plus running risk plus boldness, each scaled to 1 and the risk capped at three times
    its level. So the whole range stays covered, and most candidates are spent where the choice will fall.

    Args:
        replayed: results `[G, n]` of all candidates on the validation split.
        traces: the validation traces.
        risk: what is to be certified.
        size: how many candidates are wanted.
        boldness: a third coordinate in [0, 1] that rises with the savings; it tells candidates apart where few
            validation problems do.
    """
    savings = savings_of(replayed, traces)
    order = np.argsort(savings, kind="stable")
    order = order[savings[order] > 0]
    if order.size == 0:
        return order
    rate = np.maximum.accumulate(risk.losses(replayed).mean(axis=-1)[order])
    place = savings[order] / savings[order[-1]] + np.minimum(rate / (3 * risk.alpha), 1.0) + boldness[order]
    levels = np.linspace(place[0], place[-1], size)
    return np.asarray(order[np.unique(np.abs(place - levels[:, None]).argmin(axis=1))])

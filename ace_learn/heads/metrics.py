"""How good signals are, measured on rows that the head has not seen, by scikit-learn and SciPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.stats import spearmanr
from sklearn.metrics import r2_score, roc_auc_score
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.signals import LEARNED

#: From which share of matching samples on a row counts as one that matches.
POSITIVE = 0.5


class RegressionMetrics(NamedTuple):
    """Of a numeric signal.

    Attributes:
        r2: Share of the variance explained; None where the target is constant.
        spearman: Rank correlation; None where target or prediction is constant.
        rows: Rows with the target.
    """

    r2: float | None
    spearman: float | None
    rows: int


class ClassificationMetrics(NamedTuple):
    """Of a probability.

    Attributes:
        auc: Area under the ROC curve; None where all rows are of one class.
        ece: Expected calibration error over 10 bins of equal width; None where there is no row. Where the loss of
            consistency is balanced, the probability is that of a balanced population, and this shows the difference.
        base_rate: The mean target; None where there is no row.
        rows: Rows with the target.
    """

    auc: float | None
    ece: float | None
    base_rate: float | None
    rows: int


class HeadMetrics(NamedTuple):
    """Of every signal.

    Attributes:
        confidence: In probability.
        progress: As share of the minimal reasoning.
        remaining: In tokens.
        remaining_log: In log(1 + tokens), in which it is trained.
        consistency: At boundaries.
    """

    confidence: RegressionMetrics
    progress: RegressionMetrics
    remaining: RegressionMetrics
    remaining_log: RegressionMetrics
    consistency: ClassificationMetrics

    def to_json(self) -> dict[str, JSON]:
        """The metrics as a JSON object."""
        return {name: dict(metrics._asdict()) for name, metrics in self._asdict().items()}

    @classmethod
    def from_json(cls, value: JSON, *, where: str = "metrics") -> HeadMetrics:
        """Reads what `to_json` gave.

        Raises:
            ValueError: A field is missing or wrong.
        """
        fields = JsonFields.of(value, where=where)
        consistency = fields.fields("consistency")
        return cls(
            confidence=_regression_from(fields.fields("confidence")),
            progress=_regression_from(fields.fields("progress")),
            remaining=_regression_from(fields.fields("remaining")),
            remaining_log=_regression_from(fields.fields("remaining_log")),
            consistency=ClassificationMetrics(
                auc=_optional(consistency, "auc"),
                ece=_optional(consistency, "ece"),
                base_rate=_optional(consistency, "base_rate"),
                rows=consistency.integer("rows"),
            ),
        )


def head_metrics(signals: Float[Tensor, "n S"], targets: Float[Tensor, "n S"]) -> HeadMetrics:
    """Metrics of predicted signals.

    Args:
        signals: Predictions in natural units, columns `LEARNED`.
        targets: Targets in natural units, nan where undefined.
    """
    predicted, known = signals.double().numpy(), targets.double().numpy()
    columns = {}
    for index, name in enumerate(LEARNED):
        defined = ~np.isnan(known[:, index])
        columns[name] = (known[defined, index], predicted[defined, index])
    target, prediction = columns["remaining"]
    return HeadMetrics(
        confidence=regression(*columns["confidence"]),
        progress=regression(*columns["progress"]),
        remaining=regression(target, prediction),
        remaining_log=regression(np.log1p(target), np.log1p(prediction)),
        consistency=classification(*columns["consistency"]),
    )


def regression(target: Float[ndarray, " n"], predicted: Float[ndarray, " n"]) -> RegressionMetrics:
    """R2 and Spearman's rank correlation."""
    if target.size == 0 or np.ptp(target) == 0:
        return RegressionMetrics(None, None, target.size)
    rank = None if np.ptp(predicted) == 0 else float(spearmanr(target, predicted).statistic)
    return RegressionMetrics(float(r2_score(target, predicted)), rank, target.size)


def classification(
    target: Float[ndarray, " n"] | Bool[ndarray, " n"], probability: Float[ndarray, " n"]
) -> ClassificationMetrics:
    """Area under the ROC curve and expected calibration error.

    Args:
        target: Whether, or how often (0 to 1), it came true; for the ROC curve, a row is positive from `POSITIVE` on.
        probability: Of it coming true.
    """
    if target.size == 0:
        return ClassificationMetrics(None, None, None, 0)
    positive = target >= POSITIVE
    one_class = bool(positive.all() or not positive.any())
    auc = None if one_class else float(roc_auc_score(positive, probability))
    return ClassificationMetrics(
        auc, expected_calibration_error(target, probability), float(target.mean()), target.size
    )


def expected_calibration_error(
    target: Float[ndarray, " n"] | Bool[ndarray, " n"], probability: Float[ndarray, " n"], *, bins: int = 10
) -> float:
    """The mean gap between probability and frequency over bins of equal width, weighted by their rows.

    Args:
        target: Whether, or how often, it came true.
        probability: Of it coming true.
        bins: How many.
    """
    places = np.minimum((probability * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(places, weights=probability - target, minlength=bins)
    return float(np.abs(gaps).sum() / target.size)


def _regression_from(fields: JsonFields) -> RegressionMetrics:
    return RegressionMetrics(
        r2=_optional(fields, "r2"), spearman=_optional(fields, "spearman"), rows=fields.integer("rows")
    )


def _optional(fields: JsonFields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key)

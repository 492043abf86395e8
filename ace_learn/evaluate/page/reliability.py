"""Predicted probabilities against what happened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.special import ndtri

from ace_learn.heads.metrics import expected_calibration_error


@dataclass(frozen=True, kw_only=True, eq=False)
class Reliability:
    """Predictions in bins of equal width; empty bins are left out.

    Attributes:
        predicted: mean prediction of each bin.
        observed: share of each bin that came true.
        low: lower end of the Wilson 95% interval of `observed`.
        high: upper end.
        counts: predictions in each bin.
        bins: bins of the unit interval, empty ones included.
        ece: expected calibration error over the bins, as in the head's metrics.
    """

    predicted: Float[ndarray, " b"]
    observed: Float[ndarray, " b"]
    low: Float[ndarray, " b"]
    high: Float[ndarray, " b"]
    counts: Int[ndarray, " b"]
    bins: int
    ece: float

    @property
    def caption(self) -> str:
        """What the figure shows, with the calibration error."""
        return (
            f"{int(self.counts.sum()):,} predictions in {self.bins} bins of equal width; expected calibration error "
            f"{self.ece:.3f}. Whiskers: Wilson 95% intervals, which take the predictions as independent. On the "
            "diagonal, predictions come true as often as they say."
        )


def reliability(predicted: Float[ndarray, " n"], observed: Bool[ndarray, " n"], *, bins: int = 10) -> Reliability:
    """Bin predictions and count how often they came true.

    Args:
        predicted: probabilities in [0, 1].
        observed: whether each came true.
        bins: number of bins of equal width.

    Raises:
        ValueError: no prediction, no bin, or a prediction outside [0, 1].
    """
    if bins < 1 or predicted.size == 0:
        raise ValueError(f"a reliability diagram needs predictions and bins, not {predicted.size} and {bins}")
    if not np.all((predicted >= 0) & (predicted <= 1)):
        raise ValueError("predictions must be probabilities in [0, 1]; leave out what is not known")
    values = predicted.astype(np.float64)
    places = np.minimum((values * bins).astype(np.int64), bins - 1)
    counts = np.bincount(places, minlength=bins)
    filled = counts > 0
    known = counts[filled]
    hits = np.bincount(places, weights=observed, minlength=bins)[filled]
    low, high = wilson_interval(hits, known)
    return Reliability(
        predicted=np.bincount(places, weights=values, minlength=bins)[filled] / known,
        observed=hits / known,
        low=low,
        high=high,
        counts=known,
        bins=bins,
        ece=expected_calibration_error(observed, values, bins=bins),
    )


def wilson_interval(
    hits: Float[ndarray, " b"] | Int[ndarray, " b"], counts: Int[ndarray, " b"], *, confidence: float = 0.95
) -> tuple[Float[ndarray, " b"], Float[ndarray, " b"]]:
    """Wilson's score interval of binomial rates (Wilson 1927).

    Args:
        hits: events.
        counts: trials, each >= 1.
        confidence: two-sided level.

    Returns:
        Lower and upper ends.
    """
    z = float(ndtri((1 + confidence) / 2))
    rate = hits / counts
    scale = 1 + z * z / counts
    centre = (rate + z * z / (2 * counts)) / scale
    half = z * np.sqrt(rate * (1 - rate) / counts + z * z / (4.0 * counts * counts)) / scale
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)

"""Paired bootstrap over problems: seeded, vectorised, with bounded memory."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

_CHUNK_CELLS = 1 << 22
"""Most cells of a [replicates, n] intermediate held at once."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Bootstrap(NamedTuple):
    """How to resample. The same settings and the same n give the same resamples, so that statistics stay paired.

    Attributes:
        replicates: number R of resamples.
        seed: seed of the resampling.
    """

    replicates: int = 2000
    seed: int = 0

    def sums(self, columns: Float[ndarray, "n k"]) -> Float[ndarray, "R k"]:
        """Sum every column over each resample of the n problems."""
        n = columns.shape[0]
        generator = np.random.default_rng(self.seed)
        out = np.empty((self.replicates, columns.shape[1]))
        step = max(1, _CHUNK_CELLS // max(1, n))
        for start in range(0, self.replicates, step):
            rows = min(step, self.replicates - start)
            drawn = generator.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
            out[start : start + rows] = counts.astype(np.float64) @ columns
        return out


def percentile_interval(values: Float[ndarray, " R"], confidence: float = 0.95) -> Interval:
    """Two-sided percentile interval; replicates without a value (nan) are left out, and none at all gives nan."""
    known = values[np.isfinite(values)]
    if known.size == 0:
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def lower_bound(values: Float[ndarray, " R"], confidence: float = 0.95) -> float:
    """One-sided percentile lower bound."""
    return float(np.quantile(values, 1 - confidence))

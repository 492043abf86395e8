"""What a baseline is: something with one threshold that says how each trace would have gone."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.replay import Replayed, exit_scores, replay, threshold_exits
from ace_learn.evaluate.traces import Traces


@runtime_checkable
class Baseline(Protocol):
    """One way of deciding when to stop thinking, with one threshold.

    Attributes:
        name: its name in the result table.
        tuned: whether its threshold is chosen by calibration; otherwise it is the first of its grid.
    """

    name: ClassVar[str]
    tuned: ClassVar[bool]

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """At most about `size` thresholds to try, from the safest to the greediest.

        Args:
            traces: traces that are neither calibrated nor tested on.
            size: how many thresholds are wanted.
        """
        ...

    def replay(self, traces: Traces, thresholds: Float[ndarray, " G"]) -> Replayed:
        """Results at each threshold, each field `[G, n]`."""
        ...


class ScoreBaseline(ABC):
    """A baseline that exits at the first boundary whose score is above the threshold."""

    name: ClassVar[str]
    tuned: ClassVar[bool]

    @abstractmethod
    def scores(self, traces: Traces) -> Float[ndarray, "n P"]:
        """Score of every boundary; the values on padding do not matter."""

    @abstractmethod
    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """At most about `size` thresholds to try, from the safest to the greediest."""

    def replay(self, traces: Traces, thresholds: Float[ndarray, " G"]) -> Replayed:
        """Results at each threshold, each field `[G, n]`."""
        score = exit_scores(self.scores(traces), traces)
        return replay(traces, threshold_exits(score, thresholds, traces.num_boundaries))


def score_quantiles(score: Float[ndarray, "n P"], traces: Traces, size: int) -> Float[ndarray, " G"]:
    """Distinct observed scores at `size` evenly spaced quantiles over all boundaries, from high to low."""
    observed = score[traces.is_boundary]
    if observed.size == 0:
        return np.zeros(0)
    levels = np.quantile(observed, np.linspace(1, 0, size), method="nearest")
    return np.asarray(np.unique(levels)[::-1], dtype=np.float64)

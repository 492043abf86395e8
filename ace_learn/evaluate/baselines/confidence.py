"""`confidence`: stop after a paragraph that the model was sure of, no head needed."""

from typing import ClassVar

from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.baselines.base import ScoreBaseline, score_quantiles
from ace_learn.evaluate.traces import Traces


class Confidence(ScoreBaseline):
    """Geometric-mean token probability of the paragraph that a boundary closes, above tau."""

    name: ClassVar[str] = "confidence"
    tuned: ClassVar[bool] = True

    def scores(self, traces: Traces) -> Float[ndarray, "n P"]:
        """The stored confidence of each boundary's paragraph."""
        return traces.boundary_confidence

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """Quantiles of the observed confidences, from high to low."""
        return score_quantiles(self.scores(traces), traces, size)

"""`full`: think to the natural end."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.baselines.base import ScoreBaseline
from ace_learn.evaluate.traces import Traces


class Full(ScoreBaseline):
    """Never exits."""

    name: ClassVar[str] = "full"
    tuned: ClassVar[bool] = False

    def scores(self, traces: Traces) -> Float[ndarray, "n P"]:
        """Zero everywhere, which is above no threshold of the grid."""
        return np.zeros(traces.boundary.shape)

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """The one threshold that nothing exceeds."""
        return np.zeros(1)

"""`oracle`: exit at the first boundary whose answer matches the full one; needs the answer, so it is a bound."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.baselines.base import ScoreBaseline
from ace_learn.evaluate.traces import Traces


class Oracle(ScoreBaseline):
    """Exits at the minimal boundary b* (`first`)."""

    name: ClassVar[str] = "oracle"
    tuned: ClassVar[bool] = False

    def scores(self, traces: Traces) -> Float[ndarray, "n P"]:
        """One at b*, zero elsewhere."""
        return np.asarray(np.arange(traces.num_columns) == traces.first[:, None], dtype=np.float64)

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """One threshold between the two values of the score."""
        return np.full(1, 0.5)

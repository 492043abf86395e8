"""`budget`: stop at the first boundary with at least N thought tokens."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.baselines.base import ScoreBaseline, score_quantiles
from ace_learn.evaluate.replay import Replayed
from ace_learn.evaluate.traces import Traces


class Budget(ScoreBaseline):
    """A fixed number of thinking tokens for every problem; its threshold is the budget N."""

    name: ClassVar[str] = "budget"
    tuned: ClassVar[bool] = True

    def scores(self, traces: Traces) -> Float[ndarray, "n P"]:
        """Thought tokens plus one, which is above N exactly when at least N tokens have been thought."""
        return (traces.boundary + 2).astype(np.float64)

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """Budgets at quantiles of the boundaries' thought tokens, from the longest to the shortest."""
        budgets = score_quantiles(self.scores(traces) - 1, traces, size)
        return np.unique(np.append(budgets, 0.0))[::-1].copy()

    def curve(self, traces: Traces, size: int) -> Replayed:
        """Results along budgets of these very traces, from one that stops nothing to 0: the curve to compare with."""
        return self.replay(traces, np.append(np.inf, self.grid(traces, size)))

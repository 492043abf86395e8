"""`no_think`: answer at once, from the template that closes the think block in the prompt."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.evaluate.replay import Replayed, replay_no_think
from ace_learn.evaluate.traces import Traces


class NoThink:
    """Never thinks; its threshold means nothing."""

    name: ClassVar[str] = "no_think"
    tuned: ClassVar[bool] = False

    def grid(self, traces: Traces, size: int) -> Float[ndarray, " G"]:
        """A single placeholder."""
        return np.zeros(1)

    def replay(self, traces: Traces, thresholds: Float[ndarray, " G"]) -> Replayed:
        """The stored runs without thinking, once per threshold."""
        times = thresholds.shape[0]
        return Replayed(*(np.repeat(field[None], times, axis=0) for field in replay_no_think(traces)))

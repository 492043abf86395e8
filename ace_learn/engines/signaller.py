"""A head together with the features that it reads, as engines ask it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from ace_learn.exit.tracker import Hidden
from ace_learn.features.spec import FeatureSpec
from ace_learn.heads.head import SignalHead
from ace_learn.heads.host import HostHead
from ace_learn.signals import DERIVED, LEARNED, SCALARS, DerivedSignal


class HeadSignaller:
    """Assembles the features that a head reads from a step's rows."""

    def __init__(self, head: SignalHead, spec: FeatureSpec, device: torch.device) -> None:
        """Puts the head on the engine's device."""
        self.head = head.to(device).eval()
        self.spec = spec

    def __call__(
        self, scalars: Float[Tensor, "B R C"], candidates: Float[Tensor, "B R D"], hidden: Hidden
    ) -> Float[Tensor, "B R L"]:
        """Learned signals of every row."""
        columns = {"target_last": hidden.last, "target_aux": hidden.aux, "scalars": scalars, "candidates": candidates}
        if hidden.draft is not None:
            columns["draft"] = hidden.draft
        signals: Tensor = self.head(torch.cat([columns[source].float() for source in self.spec.sources], dim=-1))
        return signals


class HostSignals:
    """All signals of a few rows on the host, in NumPy; derived ones as far as the running scalars give them."""

    def __init__(self, signaller: HeadSignaller | None) -> None:
        """Copies the head's weights; without a head, learned signals are NaN."""
        self._head = None if signaller is None else HostHead(signaller.head)
        self._sources = () if signaller is None else signaller.spec.sources
        self._derived = [_from_scalars(signal) for signal in DERIVED]

    def __call__(
        self, scalars: Float[ndarray, "n C"], hidden: Float[ndarray, "n H"], aux: Float[ndarray, "n A"] | None
    ) -> list[list[float]]:
        """Signals of rows, in the order of `SIGNALS`.

        Args:
            scalars: Columns `SCALARS`.
            hidden: What the target's output layer reads.
            aux: The tapped layers, concatenated; None where nothing reads them.
        """
        learned = [[np.nan] * len(LEARNED)] * len(scalars)
        if self._head is not None:
            columns = {"target_last": hidden, "target_aux": aux, "scalars": scalars}
            learned = self._head(np.concatenate([columns[source] for source in self._sources], axis=1))
        derived = [values(scalars) for values in self._derived]
        return [[*row, *own] for row, *own in zip(learned, *derived, strict=True)]


def _from_scalars(signal: DerivedSignal) -> Callable[[Float[ndarray, "n C"]], list[float]]:
    """What gives a derived signal of rows; NaN where it reads more than the running scalars."""
    if not set(signal.reads) <= set(SCALARS):
        return lambda scalars: [np.nan] * len(scalars)
    places, compute = [SCALARS.index(name) for name in signal.reads], signal.compute
    if compute is None:
        return lambda scalars: scalars[:, places[0]].tolist()
    return lambda scalars: compute(torch.from_numpy(scalars[:, places])).tolist()

"""A head together with the features that it reads, as engines ask it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.exit.tracker import Hidden
from ace_learn.features.spec import FeatureSpec
from ace_learn.heads.head import SignalHead


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

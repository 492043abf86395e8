"""Losses of the signals, over the rows where a target is defined.

confidence and progress: squared error of the sigmoid; remaining: squared error of log1p(tokens), that is the mean
squared logarithmic error; consistency: binary cross-entropy with logits. The weights are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ace_learn.exit import SIGNALS


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What each signal's loss counts in the sum."""

    confidence: float = 1.0
    """Weight of the squared error of confidence."""
    progress: float = 1.0
    """Weight of the squared error of progress."""
    remaining: float = 0.1
    """Weight of the squared error of log1p(remaining tokens), which is an order of magnitude larger than the others."""
    consistency: float = 1.0
    """Weight of the cross-entropy of consistency."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A weight is negative, or all are zero.
        """
        weights = (self.confidence, self.progress, self.remaining, self.consistency)
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError(f"loss weights must not be negative, and at least one must be positive; got {weights}")

    def tensor(self) -> Float[Tensor, " S"]:
        """The weights, columns `SIGNALS`."""
        return torch.tensor([float(getattr(self, signal)) for signal in SIGNALS])


class LossSums(NamedTuple):
    """Sums of losses over rows, so that means over several batches are exact.

    Attributes:
        total: Sum over the rows where the target is defined, per signal.
        rows: How many rows that are, per signal.
    """

    total: Float[Tensor, " S"]
    rows: Float[Tensor, " S"]

    def plus(self, other: LossSums) -> LossSums:
        """The sums over both sets of rows."""
        return LossSums(self.total + other.total, self.rows + other.rows)

    def means(self) -> Float[Tensor, " S"]:
        """The mean per signal; 0 where no row has the target."""
        return self.total / self.rows.clamp(min=1)

    def weighted(self, weights: Float[Tensor, " S"]) -> Float[Tensor, ""]:
        """The training objective: the weighted sum of the means."""
        return (self.means() * weights).sum()


def loss_sums(raw: Float[Tensor, "*rows S"], targets: Float[Tensor, "*rows S"]) -> LossSums:
    """Per-signal losses of outputs in training space.

    Args:
        raw: Outputs in training space, columns `SIGNALS`.
        targets: Targets in natural units, nan where undefined.

    Returns:
        Sums and counts per signal; gradients flow through the sums, and not into undefined rows.
    """
    defined = ~targets.isnan()
    known = torch.where(defined, targets, torch.zeros_like(targets))
    confidence, progress, remaining, consistency = raw.float().unbind(-1)
    losses = torch.stack(
        [
            (confidence.sigmoid() - known[..., 0]).square(),
            (progress.sigmoid() - known[..., 1]).square(),
            (remaining - known[..., 2].log1p()).square(),
            F.binary_cross_entropy_with_logits(consistency, known[..., 3], reduction="none"),
        ],
        dim=-1,
    )
    losses = torch.where(defined, losses, torch.zeros_like(losses)).flatten(0, -2)
    return LossSums(losses.sum(0), defined.flatten(0, -2).sum(0).float())


def member_loss(
    members: Float[Tensor, "M n S"], targets: Float[Tensor, "n S"], weights: Float[Tensor, " S"]
) -> Float[Tensor, ""]:
    """The mean of the members' objectives: each member is trained as if it were alone.

    Args:
        members: Each member's outputs in training space.
        targets: Targets in natural units, nan where undefined.
        weights: Loss weights, columns `SIGNALS`.
    """
    return loss_sums(members, targets.expand(members.shape)).weighted(weights)

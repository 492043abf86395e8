"""Losses of the signals, over the rows where a target is defined.

confidence and progress: squared error of the sigmoid; remaining: squared error of log1p(tokens), that is the mean
squared logarithmic error; consistency: binary cross-entropy with logits, whose targets may be any share from 0 to 1.

`balanced` consistency multiplies the y of the cross-entropy -y log p - (1 - y) log(1 - p) by N / (2 sum y) and the
1 - y by N / (2 sum (1 - y)), summed over the N training rows with the target: each class counts half, and the weights
sum to N as without. What is learned are then the odds of a balanced population: the true odds times
sum (1 - y) / sum y. The order of rows by consistency (AUC) means what it did; the value is no longer the frequency on
such data, so the ECE grows with the imbalance, and a threshold on it is another one. Thresholds found by calibration
are found on these values, and their certificate is as valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ace_learn.signals import LEARNED

Balance: TypeAlias = Literal["none", "balanced"]

CONSISTENCY = LEARNED.index("consistency")


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What each signal's loss counts in the sum; 0 leaves a signal untrained."""

    confidence: float = 1.0
    """Weight of the squared error of confidence."""
    progress: float = 1.0
    """Weight of the squared error of progress."""
    remaining: float = 0.1
    """Weight of the squared error of log1p(remaining tokens), which is an order of magnitude larger than the others."""
    consistency: float = 1.0
    """Weight of the cross-entropy of consistency."""
    consistency_balance: Balance = "none"
    """`balanced`: rows that match and rows that do not count half each, by the counts of the train split. The predicted
    consistency then is that of a balanced population, so its calibration error grows where the classes are unequal."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A weight is negative, or all are zero.
        """
        weights = (self.confidence, self.progress, self.remaining, self.consistency)
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError(f"loss weights must not be negative, and at least one must be positive; got {weights}")

    def tensor(self) -> Float[Tensor, " S"]:
        """The weights, columns `LEARNED`."""
        return torch.tensor([float(getattr(self, signal)) for signal in LEARNED])


class LossSums(NamedTuple):
    """Sums of losses over rows, so that means over several batches are exact.

    Attributes:
        total: Sum over the rows where the target is defined, per signal; of one head or of each member.
        rows: How many rows that are, per signal.
    """

    total: Float[Tensor, "*members S"]
    rows: Float[Tensor, " S"]

    def plus(self, other: LossSums) -> LossSums:
        """The sums over both sets of rows."""
        return LossSums(self.total + other.total, self.rows + other.rows)

    def means(self) -> Float[Tensor, "*members S"]:
        """The mean per signal; 0 where no row has the target."""
        return self.total / self.rows.clamp(min=1)

    def weighted(self, weights: Float[Tensor, " S"]) -> Float[Tensor, ""]:
        """The training objective: the weighted sum of the means."""
        return (self.means() * weights).sum()


def class_weights(targets: Float[Tensor, "n S"]) -> Float[Tensor, " 2"]:
    """What rows of either class count in the balanced loss of consistency: those that do not match, those that do.

    Args:
        targets: Targets of the training rows, nan where undefined.

    Raises:
        ValueError: One of the classes has no rows.
    """
    consistency = targets[:, CONSISTENCY].double()
    consistency = consistency[~consistency.isnan()]
    counts = torch.stack([(1 - consistency).sum(), consistency.sum()])
    if counts.min() <= 0:
        raise ValueError(
            f"losses.consistency_balance is balanced, but of the {consistency.shape[0]:,} training rows with a "
            f"consistency target {counts[1].item():g} match; choose none, or build the data set with more problems"
        )
    return (consistency.shape[0] / (2 * counts)).float()


def loss_sums(
    raw: Float[Tensor, "*rows S"],
    targets: Float[Tensor, "*rows S"],
    consistency_weights: Float[Tensor, " 2"] | None = None,
) -> LossSums:
    """Per-signal losses of outputs in training space.

    Args:
        raw: Outputs in training space, columns `LEARNED`.
        targets: Targets in natural units, nan where undefined.
        consistency_weights: What `class_weights` gave, for the balanced loss.

    Returns:
        Sums and counts per signal; gradients flow through the sums, and not into undefined rows.
    """
    defined = ~targets.isnan()
    losses = _losses(raw, targets, consistency_weights).flatten(0, -2)
    return LossSums(losses.sum(0), defined.flatten(0, -2).sum(0).float())


def member_sums(
    members: Float[Tensor, "M n S"],
    targets: Float[Tensor, "n S"],
    consistency_weights: Float[Tensor, " 2"] | None = None,
) -> LossSums:
    """Per-signal losses of each member, which is trained as if it were alone.

    Args:
        members: Each member's outputs in training space.
        targets: Targets in natural units, nan where undefined.
        consistency_weights: What `class_weights` gave, for the balanced loss.

    Returns:
        Sums per member and signal, counts per signal.
    """
    losses = _losses(members, targets.expand(members.shape), consistency_weights)
    return LossSums(losses.sum(1), (~targets.isnan()).sum(0).float())


def _losses(
    raw: Float[Tensor, "*rows S"], targets: Float[Tensor, "*rows S"], consistency_weights: Float[Tensor, " 2"] | None
) -> Float[Tensor, "*rows S"]:
    """The loss of every row and signal, 0 where the target is undefined."""
    defined = ~targets.isnan()
    known = torch.where(defined, targets, torch.zeros_like(targets))
    confidence, progress, remaining, consistency = raw.float().unbind(-1)
    losses = torch.stack(
        [
            (confidence.sigmoid() - known[..., 0]).square(),
            (progress.sigmoid() - known[..., 1]).square(),
            (remaining - known[..., 2].log1p()).square(),
            _cross_entropy(consistency, known[..., CONSISTENCY], consistency_weights),
        ],
        dim=-1,
    )
    return torch.where(defined, losses, torch.zeros_like(losses))


def _cross_entropy(
    logit: Float[Tensor, "*rows"], target: Float[Tensor, "*rows"], weights: Float[Tensor, " 2"] | None
) -> Float[Tensor, "*rows"]:
    if weights is None:
        return F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    return weights[0] * (1 - target) * F.softplus(logit) + weights[1] * target * F.softplus(-logit)

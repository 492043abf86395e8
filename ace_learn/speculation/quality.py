"""Running quality of predicted acceptance, in sums of fixed size that a device keeps without waiting."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ECE_BINS = 10
_BINS = 1000
"""Of equal width over [0, 1]; AUC counts a pair in one bin as a tie."""


class QualityFigures(NamedTuple):
    """How good predictions were.

    Attributes:
        auc: Area under the ROC curve; NaN while all labels are alike.
        log_loss: Mean, nats.
        ece: Expected calibration error over 10 bins of equal width.
        mean_prediction: Mean of the predictions.
        acceptance: Share of positive labels.
        labels: How many labels.
    """

    auc: float
    log_loss: float
    ece: float
    mean_prediction: float
    acceptance: float
    labels: int


class AcceptanceQuality:
    """Adds up predictions and labels; `figures` waits for the device, `add` does not."""

    def __init__(self, device: torch.device) -> None:
        """Starts with nothing."""
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forgets what was added."""
        self._counts = torch.zeros(2, _BINS, dtype=torch.double, device=self.device)
        self._predicted = torch.zeros(_BINS, dtype=torch.double, device=self.device)
        self._log_loss = torch.zeros((), dtype=torch.double, device=self.device)

    def add(
        self, predicted: Float[Tensor, "*rows"], label: Float[Tensor, "*rows"], observed: Bool[Tensor, "*rows"]
    ) -> None:
        """Counts the observed rows."""
        weight, predicted = observed.double().flatten(), predicted.double().flatten()
        positive = weight * label.flatten()
        place = (predicted * _BINS).long().clamp(0, _BINS - 1)
        self._counts[1].index_add_(0, place, positive)
        self._counts[0].index_add_(0, place, weight - positive)
        self._predicted.index_add_(0, place, weight * predicted)
        safe = predicted.clamp(1e-12, 1.0 - 1e-12)
        self._log_loss -= (positive * safe.log() + (weight - positive) * (1.0 - safe).log()).sum()

    def figures(self) -> QualityFigures:
        """The figures so far; NaN without labels."""
        negative, positive = self._counts.cpu()
        both, predicted = negative + positive, self._predicted.cpu()
        count = float(both.sum())
        if count == 0:
            return QualityFigures(torch.nan, torch.nan, torch.nan, torch.nan, torch.nan, 0)
        below = negative.cumsum(0) - negative / 2
        pairs = float(positive.sum() * negative.sum())
        gaps = (positive - predicted).view(ECE_BINS, -1).sum(-1).abs().sum()
        return QualityFigures(
            auc=float((positive * below).sum()) / pairs if pairs else torch.nan,
            log_loss=float(self._log_loss) / count,
            ece=float(gaps) / count,
            mean_prediction=float(predicted.sum()) / count,
            acceptance=float(positive.sum()) / count,
            labels=int(count),
        )

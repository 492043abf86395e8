"""The training class: a LightningModule around the head that is shipped."""

from __future__ import annotations

from typing import TypedDict

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor

from ace_learn.exit import SIGNALS
from ace_learn.heads.data import Batch
from ace_learn.heads.head import SignalHead
from ace_learn.heads.losses import LossSums, LossWeights, loss_sums, member_loss

#: The name under which the validation objective is logged and watched.
VALIDATION_LOSS = "validation/loss"


class EpochLosses(TypedDict):
    """The objective after an epoch: mean over its steps, and of the averaged members on the validation split."""

    train: float
    validation: float


class HeadModule(LightningModule):
    """Trains a `SignalHead`.

    Attributes:
        head: The head, which is what gets exported.
        history: One entry per finished epoch; part of the checkpoints.
    """

    def __init__(self, head: SignalHead, *, weights: LossWeights, lr: float, weight_decay: float, seed: int) -> None:
        """Wraps a head.

        Args:
            head: The head to train.
            weights: Loss weights.
            lr: Learning rate of AdamW.
            weight_decay: Weight decay of AdamW.
            seed: Of dropout, drawn anew from seed and epoch at every epoch, so that a resumed run goes on as it would.
        """
        super().__init__()
        self.head = head
        self.history: list[EpochLosses] = []
        self._lr = lr
        self._weight_decay = weight_decay
        self._seed = seed
        self.register_buffer("_weights", weights.tensor(), persistent=False)
        self._train_losses: list[Tensor] = []
        self._validation_sums: LossSums | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(self.head.parameters(), lr=self._lr, weight_decay=self._weight_decay)

    def on_train_epoch_start(self) -> None:
        """Seeds the epoch."""
        torch.manual_seed(1_000_003 * self._seed + self.current_epoch)
        self._train_losses = []

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """The mean of the members' objectives."""
        loss = member_loss(self.head.members_raw(batch.features), batch.targets, self._loss_weights)
        self._train_losses.append(loss.detach())
        return loss

    def on_validation_epoch_start(self) -> None:
        """Clears the sums."""
        self._validation_sums = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the sums, so that the means are over rows and not over batches."""
        sums = loss_sums(self.head.raw(batch.features), batch.targets)
        self._validation_sums = sums if self._validation_sums is None else self._validation_sums.plus(sums)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation losses."""
        assert self._validation_sums is not None, "validation ran over no batch"
        self.log(VALIDATION_LOSS, self._validation_sums.weighted(self._loss_weights), prog_bar=True)
        means = self._validation_sums.means()
        self.log_dict({f"validation/{signal}": means[index] for index, signal in enumerate(SIGNALS)})

    def on_train_epoch_end(self) -> None:
        """Logs the training loss and completes the history; the checkpoint of the epoch is written after this."""
        train = torch.stack(self._train_losses).mean()
        self.log("train/loss", train, prog_bar=True)
        validation = self.trainer.callback_metrics[VALIDATION_LOSS]
        self.history.append({"train": float(train), "validation": float(validation)})

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Adds the history."""
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Takes the history up."""
        history = checkpoint["history"]
        assert isinstance(history, list), "a checkpoint of another program"
        self.history = [{"train": float(entry["train"]), "validation": float(entry["validation"])} for entry in history]

    @property
    def _loss_weights(self) -> Tensor:
        return self.get_buffer("_weights")

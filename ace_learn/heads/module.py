"""The training class: a LightningModule around the head that is shipped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor

from ace_learn.artifacts import JSON
from ace_learn.heads.config import OptimizerConfig
from ace_learn.heads.data import Batch
from ace_learn.heads.head import SignalHead
from ace_learn.heads.history import EpochLosses, epoch_from_json, epoch_to_json
from ace_learn.heads.losses import LossSums, LossWeights, loss_sums, member_sums
from ace_learn.heads.runs import VALIDATION_LOSS
from ace_learn.heads.weighting import FixedWeighting, GradientWeighting, WeightingConfig, Weights
from ace_learn.signals import LEARNED

#: Steps between two entries of weights and gradient norms in the log; every entry waits for the device.
LOG_EVERY = 10


class _Step(NamedTuple):
    """What a training step leaves for the history.

    Attributes:
        loss: The objective.
        losses: Of every signal, mean over the members.
        weights: Of every signal, mean over the members.
        norms: Of every signal's gradient on the shared layer, mean over the members; None where weights are fixed.
    """

    loss: Float[Tensor, ""]
    losses: Float[Tensor, " S"]
    weights: Float[Tensor, " S"]
    norms: Float[Tensor, " S"] | None


class HeadModule(LightningModule):
    """Trains a `SignalHead`.

    Several processes train as one does: each has a part of every batch, losses are divided by the rows of the whole
    batch, and the sums of the validation losses are added up.

    Attributes:
        head: The head, which is what gets exported.
        weighting: The weights of the signals in the training objective; what it keeps is part of the checkpoints.
        history: One entry per finished epoch; part of the checkpoints.
    """

    def __init__(
        self,
        head: SignalHead,
        *,
        losses: LossWeights,
        weighting: WeightingConfig,
        consistency_weights: Float[Tensor, " 2"] | None,
        optimizer: OptimizerConfig,
        seed: int,
    ) -> None:
        """Wraps a head.

        Args:
            head: The head to train.
            losses: The fixed weights; they define the validation objective, whatever `weighting` is.
            weighting: The weights in training.
            consistency_weights: What the classes of consistency count; None: the same.
            optimizer: The optimizer.
            seed: Of dropout, drawn anew from seed and epoch at every epoch, so that a resumed run goes on as it would.
        """
        super().__init__()
        self.head = head
        self.history: list[EpochLosses] = []
        self._optimizer = optimizer
        self._seed = seed
        fixed = losses.tensor()
        self.register_buffer("_weights", fixed, persistent=False)
        self._balanced = consistency_weights is not None
        self.register_buffer("_consistency_weights", consistency_weights, persistent=False)
        self.weighting = (
            FixedWeighting(fixed)
            if weighting.kind == "fixed"
            else GradientWeighting(
                fixed > 0, members=head.num_members, smoothing=weighting.smoothing, average=self._average
            )
        )
        self._steps: list[_Step] = []
        self._validation_sums: LossSums | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(
            self.head.parameters(), lr=self._optimizer.lr, weight_decay=self._optimizer.weight_decay
        )

    def on_train_epoch_start(self) -> None:
        """Seeds the epoch, every process on its own."""
        torch.manual_seed(1_000_003 * self._seed + self.current_epoch + (self.trainer.global_rank << 40))
        self._steps = []

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """The mean of the members' objectives."""
        sums = member_sums(self.head.members_raw(batch.features), batch.targets, self._class_weights)
        rows = self._sum(sums.rows)
        # Gradients are averaged over the processes: the factor makes their mean the gradient of the whole batch.
        losses = LossSums(sums.total * self.trainer.world_size, rows).means()
        weights: Weights = self.weighting(losses, rows > 0, self.head.shared_parameters())
        loss: Tensor = (losses * weights.weights).sum(-1).mean()
        step = _Step(
            loss.detach(),
            losses.detach().mean(0),
            weights.weights.mean(0),
            None if weights.norms is None else weights.norms.mean(0),
        )
        self._steps.append(step)
        if step.norms is not None and batch_idx % LOG_EVERY == 0:
            self.log_dict({f"weight/{signal}": step.weights[index] for index, signal in enumerate(LEARNED)})
            self.log_dict({f"gradient_norm/{signal}": step.norms[index] for index, signal in enumerate(LEARNED)})
        return loss

    def on_validation_epoch_start(self) -> None:
        """Clears the sums."""
        self._validation_sums = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the sums, so that the means are over rows and not over batches."""
        sums = loss_sums(self.head.raw(batch.features), batch.targets, self._class_weights)
        self._validation_sums = sums if self._validation_sums is None else self._validation_sums.plus(sums)

    def on_validation_epoch_end(self) -> None:
        """Logs the validation losses, with the fixed weights, over the rows of all processes."""
        assert self._validation_sums is not None, "validation ran over no batch"
        sums = LossSums(*(self._sum(part) for part in self._validation_sums))
        self.log(VALIDATION_LOSS, sums.weighted(self.get_buffer("_weights")), prog_bar=True, sync_dist=True)
        means = sums.means()
        self.log_dict({f"validation/{signal}": means[index] for index, signal in enumerate(LEARNED)}, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        """Logs the training losses and completes the history; the checkpoint of the epoch is written after this."""
        train = self._average(torch.stack([step.loss for step in self._steps]).mean())
        losses = self._average(torch.stack([step.losses for step in self._steps]).mean(0))
        weights = torch.stack([step.weights for step in self._steps]).mean(0)
        norms = [step.norms for step in self._steps if step.norms is not None]
        self.log("train/loss", train, prog_bar=True, sync_dist=True)
        self.log_dict({f"train/{signal}": losses[index] for index, signal in enumerate(LEARNED)}, sync_dist=True)
        logged = self.trainer.callback_metrics
        self.history.append(
            EpochLosses(
                train=float(train),
                validation=float(logged[VALIDATION_LOSS]),
                train_losses=_by_signal(losses),
                validation_losses={signal: float(logged[f"validation/{signal}"]) for signal in LEARNED},
                weights=_by_signal(weights),
                gradient_norms=_by_signal(torch.stack(norms).mean(0)) if norms else {},
            )
        )

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Adds the history."""
        checkpoint["history"] = [epoch_to_json(epoch) for epoch in self.history]

    def on_load_checkpoint(self, checkpoint: dict[str, JSON]) -> None:
        """Takes the history up."""
        history = checkpoint["history"]
        assert isinstance(history, list), "a checkpoint of another program"
        self.history = [epoch_from_json(entry, where="checkpoint: history") for entry in history]

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        reduced = self.trainer.strategy.reduce(values.clone(), reduce_op="sum")
        assert isinstance(reduced, Tensor), "a reduced tensor is a tensor"
        return reduced

    def _average(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        return self._sum(values.detach()) / self.trainer.world_size

    @property
    def _class_weights(self) -> Tensor | None:
        return self.get_buffer("_consistency_weights") if self._balanced else None


def _by_signal(values: Float[Tensor, " S"]) -> dict[str, float]:
    return dict(zip(LEARNED, values.tolist(), strict=True))

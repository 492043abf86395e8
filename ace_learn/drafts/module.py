"""The training class: a LightningModule around the draft module that is shipped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from ace_learn.artifacts import JSON
from ace_learn.drafts.config import DraftOptimizer, JointSignals, Unrolling
from ace_learn.drafts.data import Batch
from ace_learn.drafts.losses import TokenSums, row_losses, step_weights
from ace_learn.drafts.rows import shifted, signal_targets, trained_rows
from ace_learn.drafts.teacher import target_states
from ace_learn.drafts.vocabulary import restrict
from ace_learn.heads.history import EpochLosses, epoch_from_json, epoch_to_json
from ace_learn.heads.losses import LossSums, loss_sums
from ace_learn.heads.runs import VALIDATION_LOSS
from ace_learn.heads.weighting import FixedWeighting, GradientWeighting
from ace_learn.models.draft_module import SIGNAL_LAYER, Draft
from ace_learn.models.target import Target
from ace_learn.reasoner.optimizer import MuonAdamW
from ace_learn.reasoner.training import rate_factor
from ace_learn.signals import LEARNED

TOKEN = "token"
"""Name of the token loss among the tasks; the signals come after it."""

ACCEPTANCE_LENGTH = "validation/acceptance_length"
"""Name of the estimated acceptance length in the log."""


class Outcome(NamedTuple):
    """What a draft gave on a batch.

    Attributes:
        tokens: Token losses and acceptance, per unrolled step.
        signals: Losses of the signals; None without signal rows.
        shared: The hidden states that all tasks read.
    """

    tokens: TokenSums
    signals: LossSums | None
    shared: Float[Tensor, "J B T H"]


class _Step(NamedTuple):
    """What a training step leaves for the history; one entry per task."""

    loss: Float[Tensor, ""]
    losses: Float[Tensor, " N"]
    weights: Float[Tensor, " N"]
    norms: Float[Tensor, " N"] | None


class DraftModule(LightningModule):
    """Trains a draft module against a frozen target.

    Attributes:
        draft: The draft, which is what gets exported.
        weighting: The weights of the tasks; what it keeps is part of the checkpoints.
        history: One entry per finished epoch; part of the checkpoints.
    """

    def __init__(
        self,
        draft: Draft,
        target: Target,
        *,
        unrolling: Unrolling,
        signals: JointSignals | None,
        optimizer: DraftOptimizer,
        consistency_weights: Float[Tensor, " 2"] | None = None,
        freeze_draft: bool = False,
        seed: int = 0,
    ) -> None:
        """Wraps a draft.

        Args:
            draft: The draft to train; it has signal rows where `signals` is given.
            target: The model that it learns from; it is no part of the module, and never trained.
            unrolling: The multi-step objective.
            signals: What the signal rows learn; None: nothing.
            optimizer: The optimizer.
            consistency_weights: What the classes of consistency count; None: the same.
            freeze_draft: Train the signal rows alone.
            seed: Of dropout, drawn anew at every epoch, so that a resumed run goes on as it would.
        """
        super().__init__()
        self.draft = draft
        self.history: list[EpochLosses] = []
        self._target, self._unrolling, self._signals = target, unrolling, signals
        self._optimizer, self._freeze, self._seed = optimizer, freeze_draft, seed
        self.tasks = (TOKEN,) if signals is None else (TOKEN, *LEARNED)
        if freeze_draft:
            for name, weight in draft.named_parameters():
                weight.requires_grad_(name.startswith(SIGNAL_LAYER))
        self.register_buffer("_step_weights", step_weights(unrolling.steps, unrolling.decay), persistent=False)
        self._balanced = consistency_weights is not None
        self.register_buffer("_consistency_weights", consistency_weights, persistent=False)
        self.register_buffer("_fixed", _fixed_weights(signals), persistent=False)
        self.weighting = self._make_weighting()
        self._steps: list[_Step] = []
        self._validation: tuple[TokenSums, LossSums | None] | None = None

    def _make_weighting(self) -> FixedWeighting | GradientWeighting:
        fixed = self.get_buffer("_fixed").clone()
        if self._freeze:
            fixed[0] = 0
        if self._signals is None or self._signals.weighting.kind == "fixed":
            return FixedWeighting(fixed)
        return GradientWeighting(fixed > 0, members=1, smoothing=self._signals.weighting.smoothing)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, or Muon for the matrices, with warm-up and cosine per step."""
        options = self._optimizer
        trained = {name: weight for name, weight in self.draft.named_parameters() if weight.requires_grad}
        optimizer: torch.optim.Optimizer
        if options.matrix_rate is None:
            decay = options.weight_decay or 0.0
            optimizer = torch.optim.AdamW(trained.values(), lr=options.lr, weight_decay=decay)
        else:
            outputs = ("embed_tokens", "lm_head", SIGNAL_LAYER)
            matrices = [name for name, weight in trained.items() if weight.ndim == 2 and not name.startswith(outputs)]
            optimizer = MuonAdamW(
                [trained[name] for name in matrices],
                [weight for name, weight in trained.items() if name not in matrices],
                matrix_rate=options.matrix_rate,
                other_rate=options.lr,
            )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, steps=steps, warmup_steps=options.warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def outcome(self, batch: Batch) -> Outcome:
        """Runs target and draft over a batch of traces."""
        states = target_states(self._target, batch.tokens, self.draft.taps(self._target.identity.num_layers))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._freeze):
            unrolled = self.draft.unroll(batch.tokens, self.draft.fuse(states.aux), self._unrolling.steps)
            shared = torch.stack([output.read for output in unrolled])
            tokens = self._token_sums(shared, states.logits, batch)
        signals = None if self._signals is None else self._signal_sums(shared[0], batch)
        return Outcome(tokens, signals, shared)

    def signal_rows(self, shared: Float[Tensor, "B T H"], batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs of the signal rows in training space, and their targets, over the columns that have one: [n S]."""
        assert self._signals is not None, "this run trains no signals"
        targets = signal_targets(batch.targets, self._signals.offset)
        known = ~targets.isnan().all(-1)
        return self.draft.signal_logits(shared[known][None])[0], targets[known]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The weighted sum of the token loss and the losses of the signals."""
        outcome = self.outcome(batch)
        losses = outcome.tokens.objective(self.get_buffer("_step_weights"))[None]
        seen = outcome.tokens.rows[:1] > 0
        if outcome.signals is not None:
            losses = torch.cat((losses, outcome.signals.means()))
            seen = torch.cat((seen, outcome.signals.rows > 0))
        weights, norms = self._weights(losses, seen, outcome.shared)
        loss: Tensor = (losses * weights).sum()
        self._steps.append(_Step(loss.detach(), losses.detach(), weights, norms))
        return loss

    def on_train_epoch_start(self) -> None:
        """Seeds the epoch."""
        torch.manual_seed(1_000_003 * self._seed + self.current_epoch)
        self._steps = []

    def on_validation_epoch_start(self) -> None:
        """Clears the sums."""
        self._validation = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the sums, so that the means are over rows and not over batches."""
        outcome = self.outcome(batch)
        if self._validation is None:
            self._validation = outcome.tokens, outcome.signals
            return
        tokens, signals = self._validation
        both = None if signals is None or outcome.signals is None else signals.plus(outcome.signals)
        self._validation = tokens.plus(outcome.tokens), both

    def on_validation_epoch_end(self) -> None:
        """Logs the validation losses, with the fixed weights, and the estimated acceptance length."""
        assert self._validation is not None, "validation ran over no batch"
        tokens, signals = self._validation
        losses = tokens.objective(self.get_buffer("_step_weights"))[None]
        if signals is not None:
            losses = torch.cat((losses, signals.means()))
        self.log(VALIDATION_LOSS, (losses * self.get_buffer("_fixed")).sum(), prog_bar=True)
        self.log(ACCEPTANCE_LENGTH, tokens.acceptance_length(), prog_bar=True)
        self.log_dict({f"validation/{task}": losses[index] for index, task in enumerate(self.tasks)})

    def on_train_epoch_end(self) -> None:
        """Logs the training losses and completes the history; the checkpoint of the epoch is written after this."""
        losses = torch.stack([step.losses for step in self._steps]).mean(0)
        weights = torch.stack([step.weights for step in self._steps]).mean(0)
        norms = [step.norms for step in self._steps if step.norms is not None]
        train = torch.stack([step.loss for step in self._steps]).mean()
        self.log("train/loss", train, prog_bar=True)
        self.log_dict({f"train/{task}": losses[index] for index, task in enumerate(self.tasks)})
        self.log_dict({f"weight/{task}": weights[index] for index, task in enumerate(self.tasks)})
        logged = self.trainer.callback_metrics
        self.history.append(
            EpochLosses(
                train=float(train),
                validation=float(logged[VALIDATION_LOSS]),
                train_losses=self._by_task(losses),
                validation_losses={task: float(logged[f"validation/{task}"]) for task in self.tasks},
                weights=self._by_task(weights),
                gradient_norms=self._by_task(torch.stack(norms).mean(0)) if norms else {},
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

    def _token_sums(self, shared: Float[Tensor, "J B T H"], logits: Float[Tensor, "B T V"], batch: Batch) -> TokenSums:
        vocabulary = self.draft.vocabulary
        log_probs = restrict(logits, vocabulary)
        top_known = torch.isin(logits.argmax(-1), vocabulary)
        steps: list[list[Tensor]] = []
        survival = torch.ones(batch.tokens.shape, device=shared.device)
        for step, read in enumerate(shared):
            rows = trained_rows(batch.lengths, batch.prompt_lengths, width=batch.tokens.shape[1], step=step)
            row = row_losses(
                self.draft.logits(read[rows][None])[0],
                shifted(log_probs, step + 1)[rows],
                shifted(top_known, step + 1)[rows],
            )
            survival = survival.masked_scatter(rows, survival[rows] * row.acceptance)
            sums = (row.loss, row.acceptance, row.agreement, survival[rows], rows[rows].float())
            steps.append([part.sum() for part in sums])
        return TokenSums(*(torch.stack(parts) for parts in zip(*steps, strict=True)))

    def _signal_sums(self, shared: Float[Tensor, "B T H"], batch: Batch) -> LossSums:
        raw, targets = self.signal_rows(shared, batch)
        return loss_sums(raw, targets, self.get_buffer("_consistency_weights") if self._balanced else None)

    def _weights(
        self, losses: Float[Tensor, " N"], seen: Bool[Tensor, " N"], shared: Float[Tensor, "J B T H"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
        if isinstance(self.weighting, FixedWeighting):
            return self.weighting(losses[None], seen, ()).weights[0], None
        norms = activation_norms(losses, shared)
        assert self._signals is not None, "one task needs no weighting"
        weights = self.weighting.follow(norms[None], seen).weights[0].clone()
        weights[0] *= self._signals.token
        return weights, norms

    def _by_task(self, values: Float[Tensor, " N"]) -> dict[str, float]:
        return dict(zip(self.tasks, values.tolist(), strict=True))


def activation_norms(losses: Float[Tensor, " N"], shared: Float[Tensor, "*rows H"]) -> Float[Tensor, " N"]:
    """Euclidean norm of each task's gradient on the hidden states that all tasks read.

    These pass everything that a task does to the draft, and reaching them takes the output projection alone: the norm
    on the draft's weights would take a backward pass through all unrolled steps per task.

    Args:
        losses: Mean losses with their graph, which is kept.
        shared: The hidden states.
    """
    gradients = [torch.autograd.grad(loss, shared, retain_graph=True)[0] for loss in losses]
    return torch.stack([gradient.float().norm() for gradient in gradients])


def _fixed_weights(signals: JointSignals | None) -> Float[Tensor, " N"]:
    if signals is None:
        return torch.ones(1)
    return torch.cat((torch.tensor([signals.token]), signals.losses.tensor()))

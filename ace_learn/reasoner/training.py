"""Train the embedded reasoner on generated traces and export it as a plain Hugging Face folder.

The stream of batches is a function of (seed, step) alone, so a run that resumes from `last.ckpt` sees the very batches
that an uninterrupted one would have seen, and ends with the same weights.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.data import IGNORED, Batch, TraceDataModule, build_tokenizer
from ace_learn.reasoner.tokenizer import END_OF_TEXT, TURN_END, token_id


class ReasonerModule(lightning.LightningModule):
    """Next-token training of the reasoner."""

    def __init__(self, config: ReasonerTrainingConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.config = config
        self.model = build_model(config, tokenizer)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of the reply's tokens; right padding needs no mask under causal attention."""
        logits = self.model(input_ids=batch.input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, no decay on norms, warm-up and cosine per step."""
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        others = [weight for weight in self.model.parameters() if weight.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.config.learning_rate,
            betas=(0.9, 0.98),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        if step < self.config.warmup_steps:
            return (step + 1) / self.config.warmup_steps
        span = max(1, self.config.steps - self.config.warmup_steps)
        done = min(1.0, (step - self.config.warmup_steps) / span)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


class LossReport(Callback):
    """Prints a smoothed loss now and then, and keeps it for the model's recipe."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.smoothed = math.nan
        self.started = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Update the running mean of the loss."""
        loss = float(trainer.callback_metrics["loss"])
        self.smoothed = loss if math.isnan(self.smoothed) else 0.95 * self.smoothed + 0.05 * loss
        if trainer.global_step % self.every == 0:
            seconds = time.monotonic() - self.started
            print(f"step {trainer.global_step} loss {self.smoothed:.4f} seconds {seconds:.0f}", flush=True)

    def state_dict(self) -> dict[str, float]:
        """Return the running mean, for the checkpoint."""
        return {"smoothed": self.smoothed}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on from a checkpoint's running mean."""
        self.smoothed = state_dict["smoothed"]


def build_model(config: ReasonerTrainingConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a freshly initialised model of the configured size."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.hidden_size // config.heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=token_id(tokenizer, TURN_END),
            pad_token_id=token_id(tokenizer, END_OF_TEXT),
        )
    )


def train_reasoner(config: ReasonerTrainingConfig) -> Path:
    """Train (or go on training) and export; returns the folder with the exported model."""
    torch.set_num_threads(config.threads)
    lightning.seed_everything(config.seed, verbose=False)
    work_dir = Path(config.work_dir)
    tokenizer = build_tokenizer(config)
    module = ReasonerModule(config, tokenizer)
    report = LossReport(config.log_every)
    checkpoints = ModelCheckpoint(
        dirpath=work_dir, save_last=True, save_top_k=0, every_n_train_steps=config.checkpoint_every
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=config.precision,
        max_steps=config.steps,
        max_epochs=-1,
        gradient_clip_val=config.gradient_clip,
        callbacks=[checkpoints, report],
        logger=CSVLogger(work_dir, name="log"),
        log_every_n_steps=config.log_every,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = work_dir / "last.ckpt"
    ckpt_path = last if config.resume and last.exists() else None
    trainer.fit(module, TraceDataModule(config, tokenizer), ckpt_path=ckpt_path, weights_only=True)
    return export_reasoner(module, tokenizer, final_loss=report.smoothed)


def export_reasoner(module: ReasonerModule, tokenizer: PreTrainedTokenizerFast, *, final_loss: float) -> Path:
    """Write weights, tokenizer, generation defaults and the recipe as a plain Hugging Face folder."""
    config = module.config
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    module.model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    ).save_pretrained(folder)
    recipe = {"config": asdict(config), "steps_done": module.trainer.global_step, "final_loss": round(final_loss, 5)}
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    return folder

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
import transformers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ace_learn.reasoner import attention
from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.data import IGNORED, Batch, TraceDataModule, build_tokenizer
from ace_learn.reasoner.optimizer import MuonAdamW
from ace_learn.reasoner.tokenizer import END_OF_TEXT, TURN_END, token_id


class ReasonerModule(lightning.LightningModule):
    """Next-token training of the reasoner."""

    def __init__(self, config: ReasonerTrainingConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.config = config
        self.model = build_model(config, tokenizer)
        self.model.set_attn_implementation(attention.register())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of the reply's tokens; right padding needs no mask under causal attention."""
        logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Muon and AdamW, with warm-up and cosine per step."""
        weights = dict(self.model.named_parameters())
        optimizer = MuonAdamW(
            [weight for name, weight in weights.items() if weight.ndim == 2 and "embed" not in name],
            [weight for name, weight in weights.items() if weight.ndim != 2 or "embed" in name],
            matrix_rate=self.config.matrix_rate,
            other_rate=self.config.learning_rate,
        )
        steps, warmup_steps = self.config.steps, self.config.warmup_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, steps=steps, warmup_steps=warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rate_factor(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then a cosine down to a hundredth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


class LossReport(Callback):
    """Prints a smoothed loss now and then, and keeps it for the model's recipe."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.smoothed = math.nan

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
            print(f"{time.strftime('%H:%M:%S')} step {trainer.global_step} loss {self.smoothed:.4f}", flush=True)

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
    tokenizer = build_tokenizer(config) if config.start_from is None else _load_tokenizer(config.start_from)
    module = ReasonerModule(config, tokenizer)
    if config.start_from is not None:
        module.model.load_state_dict(Qwen3ForCausalLM.from_pretrained(config.start_from).state_dict())
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
    return export_reasoner(module.model, tokenizer, config, steps_done=trainer.global_step, final_loss=report.smoothed)


def _load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def export_reasoner(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: ReasonerTrainingConfig,
    *,
    steps_done: int,
    final_loss: float,
) -> Path:
    """Write weights, tokenizer, generation defaults and the recipe as a plain Hugging Face folder."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    ).save_pretrained(folder)
    recipe = {
        "config": asdict(config),
        "steps_done": steps_done,
        "final_loss": round(final_loss, 5),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    return folder

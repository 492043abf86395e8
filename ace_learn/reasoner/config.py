"""The knobs of the reasoner's training run."""

from dataclasses import dataclass, field
from typing import Literal

from ace_learn.reasoner.problems import FAMILIES, Family


@dataclass(frozen=True, kw_only=True)
class ReasonerTrainingConfig:
    """A training run of the embedded reasoner."""

    output_dir: str = "ace_learn/reasoner/weights"
    """Folder that receives the exported model."""
    work_dir: str = "runs/reasoner"
    """Folder for checkpoints and the training log."""
    seed: int = 0
    """Seeds the weights and the stream of traces."""
    steps: int = 3500
    """Optimizer steps."""
    batch_size: int = 32
    """Traces per step."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW (embeddings and norms); a cosine leads down to a hundredth of it."""
    matrix_rate: float = 0.02
    """Peak learning rate of Muon (all other weights); it follows the same course."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    vocab_size: int = 512
    """Tokens of the tokenizer, special ones included."""
    tokenizer_samples: int = 4000
    """Traces the tokenizer is trained on."""
    hidden_size: int = 128
    """Width of the model."""
    layers: int = 4
    """Number of transformer layers."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads."""
    intermediate_size: int = 384
    """Width of the feed-forward layers."""
    max_positions: int = 1024
    """Largest position the model is configured for."""
    family_weights: dict[Family, float] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 1.0))
    """How often each family is drawn, relative to the others."""
    checkpoint_every: int = 250
    """Steps between checkpoints."""
    log_every: int = 50
    """Steps between lines of the log."""
    threads: int = 1
    """CPU threads."""
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"
    """Arithmetic of the forward pass; weights are float32 either way."""
    start_from: str | None = None
    """Folder of a reasoner whose weights and tokenizer the run starts from; None: from nothing."""
    resume: bool = True
    """Continue from `last.ckpt` in `work_dir` if there is one."""

"""The configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ace_learn.artifacts import JSON, config_json
from ace_learn.features import SOURCES, Source
from ace_learn.heads.head import HeadConfig
from ace_learn.heads.losses import LossWeights

RowChoice: TypeAlias = Literal["boundaries", "all"]
Accelerator: TypeAlias = Literal["auto", "cpu", "gpu", "mps"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 2e-3
    """Learning rate."""
    weight_decay: float = 1e-2
    """Decoupled weight decay."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What is passed on to Lightning's Trainer."""

    accelerator: Accelerator = "auto"
    """Where to train."""
    device: int = 0
    """Which of the accelerator's devices; a head is too small for more than one."""
    precision: Precision = "32-true"
    """Arithmetic of the forward pass."""
    progress_bar: bool = True
    """Show a progress bar."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a signal head on a data set."""

    dataset: Path
    """The data set folder that build wrote."""
    output: Path
    """The head folder to write; an unfinished run in it is resumed."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The architecture."""
    sources: tuple[Source, ...] = SOURCES
    """The features that the head reads."""
    rows: RowChoice = "boundaries"
    """Train on the tokens that close a paragraph, or on all (for policies that smooth over tokens)."""
    losses: LossWeights = field(default_factory=LossWeights)
    """Weights of the losses."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Device and precision."""
    batch_size: int = 256
    """Rows of a step."""
    max_epochs: int = 40
    """Passes over the training rows at most."""
    patience: int = 6
    """Epochs without a better validation loss after which training stops; the best epoch is kept."""
    seed: int = 0
    """Of weights, order and dropout."""
    memory_limit_gib: float = 4.0
    """Features of a split are held in memory up to this size, and read from the memory map above it."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range.
        """
        if min(self.batch_size, self.max_epochs, self.patience) < 1:
            raise ValueError(
                "batch_size, max_epochs and patience must be at least 1; "
                f"got {self.batch_size}, {self.max_epochs}, {self.patience}"
            )

    def to_json(self) -> dict[str, JSON]:
        """The config as a JSON object."""
        return config_json(self)

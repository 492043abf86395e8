"""The configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ace_learn.artifacts import JSON, config_json
from ace_learn.features import DEFAULT_SOURCES, MinimalChoice, Source
from ace_learn.heads.head import HeadConfig
from ace_learn.heads.losses import LossWeights
from ace_learn.heads.weighting import WeightingConfig

RowChoice: TypeAlias = Literal["boundaries", "all"]
Accelerator: TypeAlias = Literal["auto", "cpu", "gpu", "mps"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]
Strategy: TypeAlias = Literal["auto", "ddp"]
Span: TypeAlias = Literal["whole", "minimal_prefix"]


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
    devices: int = 1
    """How many of the accelerator's devices, the first ones (CUDA_VISIBLE_DEVICES chooses among GPUs); of `cpu`: how
    many processes. A step's batch is divided among them, so the result does not depend on it but for rounding and
    dropout."""
    strategy: Strategy = "auto"
    """`auto`: one process for one device, `ddp` for several; `ddp`: one process per device, gradients averaged."""
    precision: Precision = "32-true"
    """Arithmetic of the forward pass."""
    progress_bar: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or there are no such devices.
        """
        if self.devices < 1:
            raise ValueError(f"trainer.devices must be at least 1; got {self.devices}")
        if self.accelerator == "mps" and (self.devices > 1 or self.strategy == "ddp"):
            raise ValueError("trainer.accelerator mps has one device and no ddp; leave out devices and strategy")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a signal head on a data set."""

    kind: Literal["head"] = "head"
    """`head`: a signal head; with `eagle3` and `mtp` the command trains a draft module instead."""
    dataset: Path
    """The data set folder that build wrote."""
    output: Path
    """The head folder to write; an unfinished run in it is resumed."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The architecture."""
    sources: tuple[Source, ...] = DEFAULT_SOURCES
    """The features that the head reads."""
    rows: RowChoice = "boundaries"
    """Train on the tokens that close a paragraph, or on all (for policies that smooth over tokens)."""
    span: Span = "whole"
    """Train on the whole trace, or on its minimal prefix: the tokens up to the minimal boundary, as SpecExit does.
    Validation is on whole traces either way, as the exit rule meets them."""
    minimal: MinimalChoice = "built"
    """The boundary that progress and remaining lead to: the one that the data set was built with, the `first` whose
    answer matches, or the `stable` one from which all later ones match."""
    losses: LossWeights = field(default_factory=LossWeights)
    """The losses: their fixed weights, and the balance of consistency."""
    weighting: WeightingConfig = field(default_factory=WeightingConfig)
    """Whether training goes by the fixed weights."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Devices and precision."""
    batch_size: int = 256
    """Rows of a step, over all devices."""
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
        if "acceptance" in self.sources:
            raise ValueError(
                "no head reads the source acceptance, since its coefficients move with traffic; leave it out of "
                "sources, and let the policy read the signal acceptance"
            )
        if self.batch_size < self.trainer.devices:
            raise ValueError(
                f"a batch of {self.batch_size} rows cannot be divided among {self.trainer.devices} devices; "
                "choose a larger batch_size or fewer trainer.devices"
            )
        if self.weighting.kind == "gradient" and self.head.arch == "linear":
            raise ValueError(
                "weighting.kind gradient compares gradients on layers that all signals share, and a linear head has "
                "none; choose head.arch mlp or ensemble, or weighting.kind fixed"
            )

    def to_json(self) -> dict[str, JSON]:
        """The config as a JSON object."""
        return config_json(self)

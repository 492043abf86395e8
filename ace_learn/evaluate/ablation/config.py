"""The recipe of an ablation: data, heads, and the questions asked of them."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ace_learn.evaluate.learned import PolicyFamily, Risk
from ace_learn.exit.policy import ExitPolicy, SmoothOver
from ace_learn.features import DEFAULT_SOURCES, MinimalChoice, Source
from ace_learn.heads.config import OptimizerConfig, RowChoice, Span, TrainConfig, TrainerConfig
from ace_learn.heads.head import HeadConfig
from ace_learn.heads.losses import LossWeights
from ace_learn.heads.weighting import WeightingConfig
from ace_learn.labels.build import BuildConfig
from ace_learn.models.target import TargetConfig

Predicate = Literal["score", "all", "any"]
Label = Literal["matches", "safe"]

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class HeadVariant:
    """A head to train; what is left out is as in `train`."""

    head: HeadConfig = field(default_factory=HeadConfig)
    """The architecture."""
    sources: tuple[Source, ...] = DEFAULT_SOURCES
    """The features that the head reads."""
    rows: RowChoice = "boundaries"
    """Train on the tokens that close a paragraph, or on all."""
    span: Span = "whole"
    """Train on the whole trace, or on its minimal prefix."""
    minimal: MinimalChoice = "built"
    """The boundary that progress and remaining lead to: the one of the data set, `first` or `stable`."""
    losses: LossWeights = field(default_factory=LossWeights)
    """The losses: their fixed weights, and the balance of consistency."""
    weighting: WeightingConfig = field(default_factory=WeightingConfig)
    """Whether training goes by the fixed weights."""
    seed: int = 0
    """Of weights, order and dropout."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What all heads have in common."""

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
    memory_limit_gib: float = 4.0
    """Features of a split are held in memory up to this size, and read from the memory map above it."""

    def train_config(self, variant: HeadVariant, *, dataset: Path, output: Path) -> TrainConfig:
        """The training run of a variant.

        Raises:
            ValueError: a value is out of range.
        """
        return TrainConfig(
            dataset=dataset,
            output=output,
            head=variant.head,
            sources=variant.sources,
            rows=variant.rows,
            span=variant.span,
            minimal=variant.minimal,
            losses=variant.losses,
            weighting=variant.weighting,
            seed=variant.seed,
            optimizer=self.optimizer,
            trainer=self.trainer,
            batch_size=self.batch_size,
            max_epochs=self.max_epochs,
            patience=self.patience,
            memory_limit_gib=self.memory_limit_gib,
        )


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """A moving average of the signals."""

    ewma: float = 1.0
    """Weight of the newest value; 1 switches smoothing off."""
    over: SmoothOver = "boundaries"
    """What it runs over: all thought `tokens`, or `boundaries` alone."""

    def __post_init__(self) -> None:
        """Refuses a value that would not be read.

        Raises:
            ValueError: no smoothing, but something to smooth over.
        """
        if self.ewma == 1.0 and self.over != "boundaries":
            raise ValueError("ewma 1 smooths nothing, so it has nothing to run over: leave `over` out, or lower ewma")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """One question: every combination of the listed values is a variant; what is not listed is the reference's."""

    title: str
    """The question, as the report's heading."""
    heads: tuple[str, ...] = ()
    """Names of heads."""
    signals: tuple[tuple[str, ...], ...] = ()
    """Sets of signals that the policy reads."""
    subsets_of: tuple[str, ...] = ()
    """Every set that can be formed of these signals, but the empty one."""
    predicates: tuple[Predicate, ...] = ()
    """`score` (a logistic model over the signals), `all` or `any` of their thresholds."""
    labels: tuple[Label, ...] = ()
    """What the score model predicts."""
    smoothing: tuple[Smoothing, ...] = ()
    """Moving averages."""
    patience: tuple[int, ...] = ()
    """Consecutive boundaries at which the predicate must hold."""
    min_thinking_tokens: tuple[int, ...] = ()
    """No exit before so many thought tokens."""

    def __post_init__(self) -> None:
        """Refuses a group without a question.

        Raises:
            ValueError: nothing is listed, or signals are named in two ways.
        """
        if self.signals and self.subsets_of:
            raise ValueError(f"the group {self.title!r} gives both signals and subsets_of; keep one of them")
        axes = (self.heads, self.signals, self.subsets_of, self.predicates, self.labels, self.smoothing,
                self.patience, self.min_thinking_tokens)  # fmt: skip
        if not any(axes):
            raise ValueError(f"the group {self.title!r} lists nothing to vary; name heads, signals, smoothing, ...")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """What every variant is compared with."""

    head: str = "reference"
    """Name of its head."""
    policy: PolicyFamily = field(default_factory=PolicyFamily)
    """Its policies, of which calibration chooses one."""


@dataclass(frozen=True, kw_only=True)
class FixedPolicy:
    """A policy whose thresholds are given: it is replayed as it is, and nothing is certified about it."""

    head: str = "reference"
    """Name of the head whose signals it reads."""
    predicate: Literal["all", "any"] = "all"
    """Whether all or any of the thresholds must hold."""
    thresholds: dict[str, float]
    """Signal -> bound."""
    smoothing: Smoothing = field(default_factory=Smoothing)
    """Moving average."""
    patience: int = 1
    """Consecutive boundaries at which the predicate must hold."""
    min_thinking_tokens: int = 0
    """No exit before so many thought tokens."""

    def policy(self) -> ExitPolicy:
        """The policy.

        Raises:
            ValueError: a value that no policy can have.
        """
        return ExitPolicy(
            predicate=self.predicate,
            thresholds=self.thresholds,
            ewma=self.smoothing.ewma,
            smooth_over=self.smoothing.over,
            patience=self.patience,
            min_thinking_tokens=self.min_thinking_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class AblateConfig:
    """What `python -m ace_learn.ablate` reads."""

    output: Path
    """Folder of heads, variants and reports; a killed run continues there, and so does one whose recipe has grown."""
    build: BuildConfig | None = None
    """The data set to build first; give this or `dataset`."""
    dataset: Path | None = None
    """A finished data set with all four splits."""
    target: TargetConfig | None = None
    """With `dataset`: the model whose tokenizer turns example traces into text; without it there are no examples."""
    heads: dict[str, HeadVariant]
    """Heads to train, by name."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """What all heads have in common."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """What every variant is compared with."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """The questions, by name."""
    fixed: dict[str, FixedPolicy] = field(default_factory=dict)
    """Policies with given thresholds, by name."""
    risk: Risk = field(default_factory=Risk)
    """What every variant and every baseline is certified for on the calibration split."""
    replicates: int = 2000
    """Bootstrap resamples of the test problems."""
    seed: int = 0
    """Of the bootstrap's resamples."""
    threads: int = 1
    """Threads of torch; small models are slower with more."""

    def __post_init__(self) -> None:
        """Checks what can be checked before anything runs.

        Raises:
            ValueError: no data, a head that is not there, or a value out of range.
        """
        if (self.build is None) == (self.dataset is None):
            raise ValueError("give either build (a data set to make) or dataset (a finished one)")
        if self.build is not None and self.target is not None:
            raise ValueError("target goes with dataset; a data set that is built has its own, in build")
        if self.replicates < 100 or self.threads < 1:
            raise ValueError(f"need replicates >= 100 and threads >= 1, not {self.replicates} and {self.threads}")
        unusable = [name for name in self.heads if not _FOLDER_NAME.fullmatch(name)]
        if unusable:
            raise ValueError(f"{unusable[0]!r} cannot name a head's folder; use letters, digits, '_', '-' and '.'")
        named = [self.reference.head, *(fixed.head for fixed in self.fixed.values())]
        named += [head for group in self.groups.values() for head in group.heads]
        missing = sorted(set(named) - set(self.heads))
        if missing:
            raise ValueError(
                f"there is no head {missing[0]!r}; the recipe's heads are {', '.join(self.heads) or 'none'}"
            )

    @property
    def model(self) -> TargetConfig | None:
        """The model that wrote the traces, where it is known."""
        return self.target if self.build is None else self.build.target

    @property
    def data(self) -> Path:
        """The data set's folder."""
        folder = self.dataset if self.build is None else self.build.output
        assert folder is not None, "checked above"
        return folder

    def head_folder(self, name: str) -> Path:
        """Where a head is trained."""
        return self.output / "heads" / name

    def train_config(self, name: str) -> TrainConfig:
        """The training run of a head.

        Raises:
            ValueError: a value is out of range.
        """
        return self.training.train_config(self.heads[name], dataset=self.data, output=self.head_folder(name))

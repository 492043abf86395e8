"""The configuration of a draft's training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ace_learn.artifacts import JSON, config_json
from ace_learn.features import MinimalChoice
from ace_learn.heads.config import TrainerConfig
from ace_learn.heads.losses import LossWeights
from ace_learn.heads.weighting import WeightingConfig
from ace_learn.models.draft_module import DraftKind
from ace_learn.models.mtp import MtpStyle
from ace_learn.models.target import TargetConfig


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The sizes of a new draft module; those left out are the target's."""

    hidden_size: int | None = None
    """H of the draft; one that differs from the target's gives an EAGLE-3 draft embeddings of its own."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads."""
    head_dim: int | None = None
    """Width of a head."""
    vocab_size: int | None = None
    """eagle3: how many tokens the draft can propose, the most frequent ones of the train split; None: all."""
    aux_layers: tuple[int, ...] | None = None
    """eagle3: the target's layers whose inputs are fused; None: those that EAGLE-3 taps."""
    style: MtpStyle | None = None
    """mtp: whose block it is, `mimo` (a decoder layer of Qwen2) or `qwen3_next` (gated attention, experts); None:
    mimo."""
    experts: int | None = None
    """qwen3_next: routed experts, beside the shared one; 0: a dense feed-forward layer. None: as the target's first
    layer, dense where the target is no Qwen3-Next."""
    active_experts: int | None = None
    """qwen3_next: routed experts that a token is given to."""
    expert_size: int | None = None
    """qwen3_next: width of an expert, the shared one included."""

    def __post_init__(self) -> None:
        """Refuses what would be ignored.

        Raises:
            ValueError: A size is one of experts that there are not.
        """
        of_experts = [name for name in ("experts", "active_experts", "expert_size") if getattr(self, name) is not None]
        if of_experts and self.style != "qwen3_next":
            raise ValueError(f"shape.{', shape.'.join(of_experts)} would be ignored; set shape.style: qwen3_next")
        if self.experts == 0 and len(of_experts) > 1:
            raise ValueError("shape.experts 0 is a dense layer: leave out shape.active_experts and shape.expert_size")

    def given(self) -> list[str]:
        """Names of the sizes that are set."""
        return [name for name in type(self).__dataclass_fields__ if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class Unrolling:
    """The multi-step objective: training-time test of EAGLE-3 (Li et al. 2025)."""

    steps: int = 5
    """How many tokens are drafted from every position in training, the draft's own states fed back."""
    decay: float = 0.8
    """What a step counts, as a share of the step before it."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range.
        """
        if self.steps < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"unrolling needs steps >= 1 and 0 < decay <= 1; got steps={self.steps}, decay={self.decay}"
            )


@dataclass(frozen=True, kw_only=True)
class JointSignals:
    """Signals from extra rows of the draft's output projection, trained together with its tokens."""

    losses: LossWeights = field(default_factory=LossWeights)
    """The losses of the signals."""
    weighting: WeightingConfig = field(default_factory=lambda: WeightingConfig(kind="gradient"))
    """`gradient`: at every step by the inverse of the norm of each task's gradient on the hidden states that the output
    projection reads, which tokens and signals share; `fixed`: by losses.*."""
    token: float = 4.0
    """What the token loss counts where one signal counts 1 (gradient) or its weight in losses.* (fixed): 4 gives the
    tokens as much as the four signals together."""
    offset: int = 1
    """Which token's targets are learnt at the draft's position p, those of p + offset. 1: of the newest token that the
    row has read; K + 1: of the token whose exit decision reads the row when K tokens are drafted."""
    minimal: MinimalChoice = "built"
    """The boundary that progress and remaining lead to: the one that the data set was built with, `first` or
    `stable`."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range.
        """
        if self.offset < 1 or self.token <= 0:
            raise ValueError(f"need signals.offset >= 1 and signals.token > 0; got {self.offset} and {self.token}")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on the draft's linear layers, the output projection excepted; merged at export."""

    rank: int = 16
    """Rank of each adapter."""
    alpha: int = 32
    """Adapters are scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout before each adapter."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range.
        """
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise ValueError(f"lora needs rank >= 1, alpha > 0 and 0 <= dropout < 1; got {self}")


@dataclass(frozen=True, kw_only=True)
class DraftOptimizer:
    """AdamW, or Muon for the matrices; the rate rises linearly and then falls as a cosine to a hundredth."""

    lr: float = 1e-3
    """Largest rate of AdamW."""
    matrix_rate: float | None = None
    """Largest rate of Muon, which then trains the weights of linear layers; None: AdamW trains everything."""
    weight_decay: float | None = None
    """Decoupled weight decay of AdamW; None: 0. Not read beside Muon."""
    warmup_steps: int = 100
    """Steps until the largest rate."""
    gradient_clip: float | None = 1.0
    """Largest norm of the gradient; None: any."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or would be ignored.
        """
        if self.matrix_rate is not None and self.weight_decay is not None:
            raise ValueError("optimizer.weight_decay is not read beside optimizer.matrix_rate; leave one of them out")
        if min(self.lr, self.matrix_rate or 1.0, self.gradient_clip or 1.0) <= 0 or self.warmup_steps < 0:
            raise ValueError(
                f"optimizer rates and gradient_clip must be positive, warmup_steps not negative; got {self}"
            )


@dataclass(frozen=True, kw_only=True)
class DraftTrainConfig:
    """Trains a draft module, and signals with it, on the traces of a data set."""

    kind: DraftKind
    """`eagle3` (hidden states of three target layers) or `mtp` (the last one; `shape.style` names the block)."""
    dataset: Path
    """The data set folder that build wrote."""
    output: Path
    """The draft folder to write; an unfinished run in it is resumed."""
    target: TargetConfig
    """The model that the data set was built with."""
    start_from: Path | None = None
    """A draft folder to go on from, ours or published (`ace_learn/reasoner-eagle3`: that of this package); None: fresh
    weights of the given shape."""
    shape: DraftShape = field(default_factory=DraftShape)
    """The sizes of a fresh draft."""
    unrolling: Unrolling = field(default_factory=Unrolling)
    """The multi-step objective."""
    signals: JointSignals | None = field(default_factory=JointSignals)
    """Signal rows; null: tokens alone."""
    freeze_draft: bool = False
    """Train the signal rows alone: the draft stays as start_from has it."""
    lora: LoraOptions | None = None
    """Adapt start_from by low-rank adapters; null: train every weight."""
    optimizer: DraftOptimizer = field(default_factory=DraftOptimizer)
    """The optimizer."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Device and precision."""
    batch_size: int = 16
    """Traces of a step."""
    max_tokens: int = 4096
    """Traces are cut behind that many tokens."""
    max_epochs: int = 20
    """Passes over the training traces at most; the rate falls to a hundredth over all of them."""
    patience: int = 5
    """Epochs without a better validation loss after which training stops; the best epoch is kept."""
    seed: int = 0
    """Of weights, order and dropout."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or would be ignored.
        """
        if min(self.batch_size, self.max_epochs, self.patience) < 1 or self.max_tokens < 4:
            raise ValueError(
                "batch_size, max_epochs and patience must be at least 1, max_tokens at least 4; "
                f"got {self.batch_size}, {self.max_epochs}, {self.patience}, {self.max_tokens}"
            )
        if self.trainer.devices > 1 or self.trainer.strategy != "auto":
            raise ValueError("drafts are trained on one device; leave out trainer.devices and trainer.strategy")
        self._check_start()

    def _check_start(self) -> None:
        given = self.shape.given()
        if self.start_from is not None and given:
            raise ValueError(f"start_from fixes the shape; leave out shape.{', shape.'.join(given)}")
        if self.kind == "mtp" and {"vocab_size", "aux_layers"} & set(given):
            raise ValueError("an mtp draft reads no shape.vocab_size or shape.aux_layers; leave them out")
        if self.kind == "eagle3" and "style" in given:
            raise ValueError("an eagle3 draft reads no shape.style; leave it out, or set kind: mtp")
        if self.start_from is None and (self.freeze_draft or self.lora is not None):
            raise ValueError("freeze_draft and lora need a trained draft; name its folder in start_from")
        if not self.freeze_draft:
            return
        if self.lora is not None or self.signals is None:
            raise ValueError("freeze_draft trains the signal rows alone: it needs signals, and no lora")
        if self.signals.weighting.kind == "gradient" or self.signals.token != JointSignals.token:
            raise ValueError(
                "with freeze_draft nothing is shared by the tasks and the token loss trains nothing: choose "
                "signals.weighting.kind fixed, and leave out signals.token"
            )

    def to_json(self) -> dict[str, JSON]:
        """The config as a JSON object."""
        return config_json(self)

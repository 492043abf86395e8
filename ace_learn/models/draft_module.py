"""What every draft module has: one block over a token and a hidden state, run against a cache or unrolled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ace_learn.models.cache import SlotCache
from ace_learn.models.draft_layers import Attend, BlockConfig, CacheAttention, DraftOutput, UnrolledAttention

DraftKind: TypeAlias = Literal["eagle3", "mtp"]

SIGNAL_LAYER = "ace_head"
"""Name of the layer whose rows give signals, beside those of the output projection."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What every draft module is made of."""

    block: BlockConfig
    """Its transformer block."""
    vocab_size: int
    """V of the target."""
    signals: tuple[str, ...] = ()
    """Names of the signals whose rows extend the output projection, S of them."""


class Draft(nn.Module, ABC):
    """Drafts from the target's hidden states; its parameters have the names of the published checkpoints.

    The row at position p reads the target's hidden state of p and the embedding of token p + 1, and its output is for
    token p + 2; what it hands on stands in for the target's hidden state of p + 1 when it drafts further.
    """

    kind: ClassVar[DraftKind]
    """What recipes call it."""
    config: DraftConfig
    vocabulary: Tensor
    """Token ids of the target that the draft can propose, ascending, [Vd]."""
    ace_head: nn.Linear
    """The signal rows, where there are any."""

    def __init__(
        self,
        config: DraftConfig,
        embeddings: Float[Tensor, "V H"] | None,
        vocabulary: Int[Tensor, " Vd"] | None = None,
    ) -> None:
        """Takes what the draft does not train; a subclass makes its layers, and the signal rows after them.

        Args:
            config: Its sizes.
            embeddings: The target's embeddings, shared and never trained; None: the draft has its own.
            vocabulary: Token ids that it can propose, ascending; None: every token.
        """
        super().__init__()
        self.config = config
        self.register_buffer("shared_embeddings", embeddings, persistent=False)
        tokens = torch.arange(config.vocab_size) if vocabulary is None else vocabulary.cpu()
        self.register_buffer("vocabulary", tokens, persistent=False)

    @abstractmethod
    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of the target, of which there are `num_layers`, that `fuse` reads."""

    @abstractmethod
    def fuse(self, aux: Float[Tensor, "B Q A"]) -> Float[Tensor, "B Q H"]:
        """One hidden state of the tapped layers' concatenated ones."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        attend: Attend,
    ) -> DraftOutput:
        """Runs rows of the draft.

        Args:
            tokens: The token behind each position.
            hidden: Fused hidden states of the positions, or what the draft has fed back.
            positions: Sequence positions p.
            attend: What the rows see: `CacheAttention` when decoding, `UnrolledAttention` when training.
        """

    @abstractmethod
    def logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q Vd"]:
        """Logits over the draft's vocabulary, float32."""

    def embed(self, tokens: Int[Tensor, "B Q"]) -> Float[Tensor, "B Q H"]:
        """Embeddings of tokens of the target."""
        weight = self.shared_embeddings
        assert isinstance(weight, Tensor), "this draft shares no embeddings"
        return nn.functional.embedding(tokens, weight)

    def decode(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        cache: SlotCache,
        *,
        longest: int,
        first_slot: int = 0,
    ) -> DraftOutput:
        """Runs rows against a cache; its arguments are those of `forward` and of `Target.forward`."""
        attend = CacheAttention(cache, cache.begin(positions, longest, first_slot))
        output: DraftOutput = self(tokens, hidden, positions, attend)
        return output

    def new_cache(self, num_slots: int) -> SlotCache:
        """An empty cache for `num_slots` requests."""
        return SlotCache(1, num_slots)

    def unroll(self, tokens: Int[Tensor, "B T"], hidden: Float[Tensor, "B T H"], steps: int) -> list[DraftOutput]:
        """Drafts `steps` tokens from every position at once, feeding back its own states (training-time test).

        Args:
            tokens: Whole sequences, padded on the right.
            hidden: What the draft reads of the target, for every position.
            steps: Number of outputs.

        Returns:
            Of output j, column p is for token p + 2 + j; columns from T - 2 - j on know no such token.
        """
        attend, outputs = UnrolledAttention(), list[DraftOutput]()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        for j in range(steps):
            tokens = nn.functional.pad(tokens[:, 1:], (0, 1))
            outputs.append(self(tokens, hidden, positions + j, attend))
            hidden = outputs[-1].fed_back
        return outputs

    def full_logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q V"]:
        """Logits over the target's vocabulary, float32; what the draft cannot propose has minus infinity."""
        logits = self.logits(read)
        if logits.shape[-1] == self.config.vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy(-1, self.vocabulary, logits)

    def make_signal_rows(self, signals: tuple[str, ...]) -> None:
        """Gives the draft fresh signal rows under these names; without names it has none."""
        self.config = replace(self.config, signals=signals)
        if hasattr(self, SIGNAL_LAYER):
            del self.ace_head
        if signals:
            self.ace_head = nn.Linear(self.config.block.hidden_size, len(signals), bias=False)

    def signal_logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q S"]:
        """What the extra rows of the output projection say, in the order of `config.signals`."""
        assert self.config.signals, "this draft has no signal rows"
        rows: Tensor = self.ace_head(read)
        return rows.float()

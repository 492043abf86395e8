"""Multi-token prediction as in MiMo (Xiaomi 2025): one block over a token's embedding and a hidden state.

Numerically vLLM's `mimo_mtp`. The row at position p reads the target's hidden state of p and the embedding of token
p + 1, and its output is for token p + 2; embeddings and output layer are the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ace_learn.models.cache import SlotCache
from ace_learn.models.draft_layers import (
    Attend,
    BlockConfig,
    CacheAttention,
    DraftAttention,
    DraftMLP,
    DraftOutput,
    RMSNorm,
    Rotary,
    unroll,
)
from ace_learn.models.target import OUTPUT

MtpTap = Literal["stream", "output"]


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """What an MTP draft is made of."""

    block: BlockConfig
    """Its transformer block; the hidden size is the target's."""
    vocab_size: int
    """V of the target."""
    tap: MtpTap = "output"
    """The target's hidden state that it reads: `stream` (before the final norm, as MiMo's own) or `output` (what the
    output layer reads; what vLLM hands on for targets of other families)."""
    signals: tuple[str, ...] = ()
    """Names of the signals whose rows extend the output projection, S of them."""

    def __post_init__(self) -> None:
        """Checks the tap."""
        if self.tap not in ("stream", "output"):
            raise ValueError(f"unknown tap {self.tap!r}; known: stream, output")


class MtpDraft(nn.Module):
    """An MTP draft; its parameters have the names of MiMo's `model.mtp_layers.0`."""

    def __init__(
        self, config: MtpConfig, embeddings: Float[Tensor, "V H"], output_weight: Float[Tensor, "V H"]
    ) -> None:
        """Makes a draft with fresh weights.

        Args:
            config: Its sizes.
            embeddings: The target's embeddings, shared and never trained.
            output_weight: Those of the target's output layer, likewise.
        """
        super().__init__()
        self.config = config
        block = config.block
        self.register_buffer("shared_embeddings", embeddings, persistent=False)
        self.register_buffer("shared_output", output_weight, persistent=False)
        self.token_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.input_proj = nn.Linear(2 * block.hidden_size, block.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.self_attn = DraftAttention(block, input_size=block.hidden_size, qkv_bias=True)
        self.post_attention_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.mlp = DraftMLP(block)
        self.final_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.rotary = Rotary(block)
        if config.signals:
            self.ace_head = nn.Linear(block.hidden_size, len(config.signals), bias=False)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Layers of the target, of which there are `num_layers`, that `fuse` reads."""
        return (num_layers,) if self.config.tap == "stream" else (OUTPUT,)

    def fuse(self, aux: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q H"]:
        """The tapped hidden state as it is."""
        return aux

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        attend: Attend,
    ) -> DraftOutput:
        """Runs rows of the draft; the arguments are those of `Eagle3Draft.forward`."""
        weight = self.shared_embeddings
        assert isinstance(weight, Tensor)
        embedded = nn.functional.embedding(tokens, weight)
        embedded = torch.where((positions == 0)[..., None], 0.0, embedded)  # as MiMo was trained
        both = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        stream = self.input_proj(both)
        stream = stream + self.self_attn(self.input_layernorm(stream), self.rotary(hidden, positions), attend)
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        read = self.final_layernorm(stream)
        return DraftOutput(fed_back=read, read=read)

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
        """Drafts `steps` tokens from every position at once; see `draft_layers.unroll`."""
        return unroll(self, tokens, hidden, steps)

    def full_logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q V"]:
        """Logits over the target's vocabulary, float32."""
        weight = self.shared_output
        assert isinstance(weight, Tensor)
        return nn.functional.linear(read, weight).float()

    def signal_logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q S"]:
        """What the extra rows of the output projection say, in the order of `config.signals`."""
        assert self.config.signals, "this draft has no signal rows"
        rows: Tensor = self.ace_head(read)
        return rows.float()

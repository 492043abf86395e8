"""Multi-token prediction: one block over an embedding and a hidden state; embeddings and output layer are the target's.

The block of MiMo (Xiaomi 2025) is numerically vLLM's `mimo_mtp`; that of Qwen3-Next is in `qwen3_next`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ace_learn.models.draft_layers import Attend, DraftAttention, DraftMLP, DraftOutput, RMSNorm, Rotary
from ace_learn.models.draft_module import Draft, DraftConfig
from ace_learn.models.target import OUTPUT

MtpStyle: TypeAlias = Literal["mimo", "qwen3_next"]
MtpTap: TypeAlias = Literal["stream", "output"]


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DraftConfig):
    """What an MTP draft is made of; its hidden size is the target's."""


class MtpDraft(Draft):
    """Drafts by one block, and reads what the target's output layer reads."""

    kind = "mtp"
    style: ClassVar[MtpStyle]
    """Whose block it is."""
    config: MtpConfig

    def __init__(
        self, config: MtpConfig, embeddings: Float[Tensor, "V H"], output_weight: Float[Tensor, "V H"]
    ) -> None:
        """Takes what is shared.

        Args:
            config: Its sizes.
            embeddings: The target's embeddings, shared and never trained.
            output_weight: Those of the target's output layer, likewise.
        """
        super().__init__(config, embeddings)
        self.register_buffer("shared_output", output_weight, persistent=False)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """What the target's output layer reads."""
        return (OUTPUT,)

    def fuse(self, aux: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q H"]:
        """The tapped hidden state as it is."""
        return aux

    def logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q V"]:
        """Those of the target's output layer, float32."""
        weight = self.shared_output
        assert isinstance(weight, Tensor)
        return nn.functional.linear(read, weight).float()


@dataclass(frozen=True, kw_only=True)
class MimoConfig(MtpConfig):
    """What an MTP draft in the style of MiMo is made of."""

    tap: MtpTap = "output"
    """The target's hidden state that it reads: `stream` (before the final norm, as MiMo's own) or `output` (what the
    output layer reads; what vLLM hands on for targets of other families)."""

    def __post_init__(self) -> None:
        """Checks the tap."""
        if self.tap not in ("stream", "output"):
            raise ValueError(f"unknown tap {self.tap!r}; known: stream, output")


class MimoDraft(MtpDraft):
    """An MTP draft; its parameters have the names of MiMo's `model.mtp_layers.0`."""

    style = "mimo"
    config: MimoConfig

    def __init__(
        self, config: MimoConfig, embeddings: Float[Tensor, "V H"], output_weight: Float[Tensor, "V H"]
    ) -> None:
        """Makes a draft with fresh weights; see `MtpDraft`."""
        super().__init__(config, embeddings, output_weight)
        block = config.block
        self.token_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.input_proj = nn.Linear(2 * block.hidden_size, block.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.self_attn = DraftAttention(block, input_size=block.hidden_size, qkv_bias=True)
        self.post_attention_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.mlp = DraftMLP(block)
        self.final_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.rotary = Rotary(block)
        self.make_signal_rows(config.signals)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """What leaves the target's last layer, or what its output layer reads."""
        return (num_layers,) if self.config.tap == "stream" else (OUTPUT,)

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        attend: Attend,
    ) -> DraftOutput:
        """Runs rows of the draft; see `Draft.forward`."""
        embedded = torch.where((positions == 0)[..., None], 0.0, self.embed(tokens))  # as MiMo was trained
        both = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        stream = self.input_proj(both)
        stream = stream + self.self_attn(self.input_layernorm(stream), self.rotary(hidden, positions), attend)
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        read = self.final_layernorm(stream)
        return DraftOutput(fed_back=read, read=read)

"""Multi-token prediction as in Qwen3-Next (Qwen Team 2025): a decoder layer with gated attention, dense or of experts.

Numerically vLLM's `qwen3_next_mtp`; the layer is that of transformers, which is given what its queries see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextExperts,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
    Qwen3NextTopKRouter,
)

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.draft_layers import ROTATED_SHARE, Attend, BlockConfig, DraftOutput, check_rope
from ace_learn.models.mtp import MtpConfig, MtpDraft

ROTATED = 0.25
"""Share of a head that Qwen3-Next rotates, where a config does not say."""

_ATTENTION = "ace_learn_draft_attend"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A sparse mixture of experts with a shared one, under the names of a Qwen3-Next config."""

    num_experts: int
    """Routed experts, E."""
    num_experts_per_tok: int
    """Routed experts that a token is given to."""
    moe_intermediate_size: int
    """Width of a routed expert."""
    shared_expert_intermediate_size: int
    """Width of the expert that every token is given to."""
    norm_topk_prob: bool = True
    """The weights of a token's experts sum to one."""

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"a token is given to 1 to {self.num_experts} of so many experts, not to {self.num_experts_per_tok}"
            )
        if min(self.moe_intermediate_size, self.shared_expert_intermediate_size) < 1:
            raise ValueError(f"experts, the shared one included, are at least 1 wide, not {self}")

    @classmethod
    def from_json(cls, fields: JsonFields) -> ExpertsConfig | None:
        """Reads the first layer's experts from a Qwen3-Next config; None where that layer is dense.

        Raises:
            ValueError: A field is missing or wrong.
        """
        count = fields.integer("num_experts")
        dense = fields.integers("mlp_only_layers") if fields.data.get("mlp_only_layers") else ()
        every = fields.integer("decoder_sparse_step") if "decoder_sparse_step" in fields.data else 1
        if count == 0 or 0 in dense or every > 1:
            return None
        return cls(
            num_experts=count,
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            shared_expert_intermediate_size=fields.integer("shared_expert_intermediate_size"),
            norm_topk_prob=fields.data.get("norm_topk_prob", True) is not False,
        )

    def to_json(self) -> dict[str, JSON]:
        """The fields as a transformers config has them."""
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "shared_expert_intermediate_size": self.shared_expert_intermediate_size,
            "norm_topk_prob": self.norm_topk_prob,
        }


def partly_rotated(block: BlockConfig, rope: Mapping[str, JSON]) -> BlockConfig:
    """A block with these rotary parameters, and the share of a head that Qwen3-Next rotates where they have none."""
    return replace(block, rope_parameters={ROTATED_SHARE: ROTATED, **rope})


@dataclass(frozen=True, kw_only=True)
class Qwen3NextMtpConfig(MtpConfig):
    """What an MTP draft in the style of Qwen3-Next is made of."""

    experts: ExpertsConfig | None = None
    """The experts; None: a dense feed-forward layer."""

    def __post_init__(self) -> None:
        """Checks the share of a head that is rotated."""
        share = self.block.rope_parameters.get(ROTATED_SHARE)
        rotated = int(self.block.head_dim * share) if isinstance(share, int | float) else 0
        if rotated < 2 or rotated % 2 or rotated > self.block.head_dim:
            raise ValueError(
                f"{ROTATED_SHARE} {share!r} rotates {rotated} of the {self.block.head_dim} dimensions of a head; "
                "an even number is needed. Choose another head_dim or factor"
            )

    def layer_json(self) -> dict[str, JSON]:
        """The decoder layer as a transformers config has it."""
        return {
            **self.block.to_json(),
            **({"num_experts": 0} if self.experts is None else self.experts.to_json()),
        }


class Qwen3NextDraft(MtpDraft):
    """An MTP draft; its parameters have the names of Qwen3-Next's `mtp`, its experts being stacked."""

    style = "qwen3_next"
    config: Qwen3NextMtpConfig

    def __init__(
        self,
        config: Qwen3NextMtpConfig,
        embeddings: Float[Tensor, "V H"],
        output_weight: Float[Tensor, "V H"],
    ) -> None:
        """Makes a draft with fresh weights; see `MtpDraft`."""
        super().__init__(config, embeddings, output_weight)
        check_rope(config.block)
        layer = _layer_config(config)
        size, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(size, epsilon)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(size, epsilon)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(layer, 0)])
        self.norm = Qwen3NextRMSNorm(size, epsilon)
        self.rotary = Qwen3NextRotaryEmbedding(layer)
        self.make_signal_rows(config.signals)
        for module in self.modules():
            if isinstance(module, Qwen3NextExperts | Qwen3NextTopKRouter):  # transformers leaves them as memory was
                for weight in module.parameters():
                    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        attend: Attend,
    ) -> DraftOutput:
        """Runs rows of the draft; see `Draft.forward`."""
        both = torch.cat((self.pre_fc_norm_embedding(self.embed(tokens)), self.pre_fc_norm_hidden(hidden)), dim=-1)
        rotary = self.rotary(hidden, positions)
        stream = self.layers[0](self.fc(both), position_embeddings=rotary, attend=attend)
        read = self.norm(stream)
        return DraftOutput(fed_back=read, read=read)


def _layer_config(config: Qwen3NextMtpConfig) -> Qwen3NextConfig:
    """A config of one layer, whose attention asks `attend`, and whose experts run without waiting for the device."""
    one = {"vocab_size": config.vocab_size, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layer = Qwen3NextConfig.from_dict({**config.layer_json(), **one})
    layer._attn_implementation = _ATTENTION
    layer._experts_implementation = "grouped_mm"
    return layer


def _attended(
    module: nn.Module,
    query: Float[Tensor, "B heads Q D"],
    key: Float[Tensor, "B kv_heads Q D"],
    value: Float[Tensor, "B kv_heads Q D"],
    attention_mask: None,
    *,
    attend: Attend,
    **kwargs: object,
) -> tuple[Float[Tensor, "B Q heads D"], None]:
    """What the layer's queries see is up to `attend`, which is handed through the layer."""
    return attend(query, key, value), None


AttentionInterface.register(_ATTENTION, _attended)

"""Parts of draft modules: a pre-norm attention block whose keys stand in a cache, or unrolled for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.attention import grouped_attention
from ace_learn.models.cache import SlotCache

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of a step, [B heads Q D], to what they mix, [B Q heads D]."""

ROTATED_SHARE = "partial_rotary_factor"
"""Name of the share of a head that is rotated, in the rotary parameters of a config."""

RMSNorm = LlamaRMSNorm
"""x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich 2019)."""


class DraftOutput(NamedTuple):
    """What a draft module says after its input tokens."""

    fed_back: Float[Tensor, "B Q H"]
    """Stands in for the target's hidden state of the next position when the draft goes on."""
    read: Float[Tensor, "B Q H"]
    """What the output projection reads."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes of a draft's transformer block, under the names of a Llama config."""

    hidden_size: int
    """H of the draft."""
    intermediate_size: int
    """Width of the feed-forward layer."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    max_position_embeddings: int = 4096
    """Largest position the block is configured for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the norms."""
    rope_parameters: dict[str, JSON] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary embedding, as in a transformers config."""

    def __post_init__(self) -> None:
        """Checks that the heads fit together."""
        if self.num_attention_heads < 1 or self.num_key_value_heads < 1 or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"need at least one head and an even head_dim, not {self}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key heads; choose a "
                "divisor"
            )

    @classmethod
    def from_json(cls, fields: JsonFields) -> BlockConfig:
        """Reads the fields of a Llama or Qwen config, of transformers 4 or 5.

        Raises:
            ValueError: A field is missing or wrong, or the block is of a kind that is not supported.
        """
        data = fields.data
        if data.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{fields.where}: activation {data['hidden_act']!r}; draft modules have silu alone")
        heads = fields.integer("num_attention_heads")
        shown: dict[str, JSON] = {name: value for name, value in data.items() if value is not None}
        read = JsonFields(data=shown, where=fields.where)
        return cls(
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads") if "num_key_value_heads" in shown else heads,
            head_dim=read.integer("head_dim") if "head_dim" in shown else fields.integer("hidden_size") // heads,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_parameters=_rope(read),
        )

    def to_json(self) -> dict[str, JSON]:
        """The fields as a transformers config has them."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters),
            "hidden_act": "silu",
        }


def _rope(fields: JsonFields) -> dict[str, JSON]:
    """`rope_parameters` of transformers 5, or what older configs call rope_theta and rope_scaling."""
    if "rope_parameters" in fields.data:
        return fields.fields("rope_parameters").data
    scaling = dict(fields.fields("rope_scaling").data) if "rope_scaling" in fields.data else {}
    if ROTATED_SHARE in fields.data:
        scaling[ROTATED_SHARE] = fields.number(ROTATED_SHARE)
    kind = scaling.pop("type", "default")
    theta = fields.number("rope_theta") if "rope_theta" in fields.data else 10000.0
    return {"rope_type": kind, "rope_theta": theta} | scaling


def check_rope(config: BlockConfig) -> None:
    """Refuses rotary embeddings that drafts do not have.

    Raises:
        ValueError: The kind of scaling is unknown, or depends on the length of the text.
    """
    kind = config.rope_parameters.get("rope_type")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rotary embeddings of kind {kind!r}; draft modules have default, linear, llama3 and yarn")


class DraftAttention(nn.Module):
    """Rotary attention with grouped heads; what the queries see is up to `attend`."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        input_size: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        """Makes the projections.

        Args:
            config: Sizes.
            input_size: Width of the input; 2H where embedding and hidden state stand side by side.
            qkv_bias: Biases of queries, keys and values (Qwen2).
            output_bias: Bias of the output projection.
            qk_norm: Norms of queries and keys (Qwen3).
        """
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(
        self, x: Float[Tensor, "B Q I"], rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Float[Tensor, "B Q H"]:
        """Attention of one step; `rotary` holds cosines and sines, [B Q D]."""
        query = self.q_norm(self._heads(self.q_proj(x)))
        key = self.k_norm(self._heads(self.k_proj(x)))
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        mixed: Tensor = self.o_proj(attend(query, key, self._heads(self.v_proj(x))).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """[B Q heads*D] as [B heads Q D]."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads


class DraftMLP(nn.Module):
    """The gated feed-forward layer of Llama and Qwen (Shazeer 2020)."""

    def __init__(self, config: BlockConfig) -> None:
        """Makes the projections."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q H"]:
        """down(silu(gate(x)) * up(x))."""
        mixed: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), with the scalings that transformers knows."""

    def __init__(self, config: BlockConfig) -> None:
        """Computes the frequencies.

        Raises:
            ValueError: The kind of scaling is unknown, or depends on the length of the text, or a part of each head is
                not rotated.
        """
        super().__init__()
        check_rope(config)
        share = config.rope_parameters.get(ROTATED_SHARE, 1.0)
        if share != 1.0:
            raise ValueError(f"{ROTATED_SHARE} {share!r}: such blocks rotate whole heads; those of Qwen3-Next a part")
        data = {name: value for name, value in config.to_json().items() if name != "rms_norm_eps"}
        self.embedding = LlamaRotaryEmbedding(LlamaConfig.from_dict(data))

    def forward(self, like: Float[Tensor, "B Q H"], positions: Int[Tensor, "B Q"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines in the dtype of `like`, [B Q D] each."""
        cosine, sine = self.embedding(like, positions)
        return cosine, sine


class CacheAttention:
    """Attends to everything before a position in a slot cache (an `Attend`)."""

    def __init__(self, cache: SlotCache, mask: Bool[Tensor, "B 1 Q L"]) -> None:
        """Reads and writes a cache on which `begin` has given the mask."""
        self.cache, self.mask = cache, mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes keys and values, and mixes what stands up to each position."""
        keys, values = self.cache.slot_layers[0].update(key, value)
        return grouped_attention(nn.Module(), query, keys, values, self.mask)[0]


class UnrolledAttention:
    """Attention over whole sequences, then over what the draft has fed back to itself (an `Attend`).

    Column p of the first call is the draft's row at position p, and attends causally. Column p of call j is the row
    that drafts j tokens further from anchor p: as in decoding it sees the first call's keys up to p and, of its own
    earlier calls, those of the same anchor alone (the training-time test of EAGLE-3, Li et al. 2025).
    """

    def __init__(self) -> None:
        """Nothing has been seen yet."""
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mixes the values of one call."""
        groups = query.shape[1] // key.shape[1]
        self.steps.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
        (first_key, first_value), later = self.steps[0], self.steps[1:]
        if not later:
            mixed = nn.functional.scaled_dot_product_attention(query, first_key, first_value, is_causal=True)
            return mixed.transpose(1, 2)
        query = query * query.shape[-1] ** -0.5
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ first_key.transpose(-1, -2)).masked_fill(future, -torch.inf)
        own = [(query * keys).sum(-1, keepdim=True) for keys, _ in later]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
        mixed = weights[..., :length] @ first_value
        for j, (_, values) in enumerate(later):
            mixed = mixed + weights[..., length + j, None] * values
        return mixed.transpose(1, 2)

"""Attention for slot caches: grouped heads without copies of the keys.

Where several query heads share a key head, the stock SDPA path repeats keys and values in every step. Here the heads of
a group become further query rows of their key head, which is the same arithmetic and reads the cache once.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface

GROUPED_ATTENTION = "ace_learn_grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "B heads Q D"],
    key: Float[Tensor, "B kv_heads L D"],
    value: Float[Tensor, "B kv_heads L E"],
    attention_mask: Bool[Tensor, "B 1 Q L"],
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "B Q heads E"], None]:
    """Scaled dot-product attention under the mask of `SlotCache.begin`.

    Raises:
        ValueError: The model asks for attention of another kind (soft caps, sinks).
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(
            f"the model's attention uses {', '.join(unknown)}, which the HF reference engine does not have"
        )
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    stacked = query.reshape(batch, key.shape[1], groups * rows, -1)
    mask = attention_mask if groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return mixed.reshape(batch, heads, rows, -1).transpose(1, 2), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)

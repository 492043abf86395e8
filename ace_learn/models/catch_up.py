"""Feeding a cache with what it lacks: prompts, and the tokens that a draft model has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.models.cache import SlotCache
from ace_learn.models.target import Target

MAX_TOKENS = 16_384
"""Tokens of one forward, padding included; bounds the memory of a prefill (activations and attention masks)."""


@torch.inference_mode()
def catch_up(
    target: Target,
    cache: SlotCache,
    feeds: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
) -> Float[Tensor, "B V"]:
    """Feeds every slot the newest tokens of its sequence; returns the logits behind each last token.

    Rows are padded on the left. Padding is written behind the longest sequence, where the positions' mask hides it
    until it is overwritten. Many rows are fed in slices of rows, and a long row in pieces.

    Args:
        target: The model.
        cache: Its cache; row i of the batch is slot i.
        feeds: The tokens to run, at least one per row; they end the row's sequence.
        lengths: Length of each sequence, fed tokens included.
        max_tokens: Most tokens of one forward.
    """
    width, ragged = max(map(len, feeds)), len(set(map(len, feeds))) > 1
    longest = max(lengths) + width * ragged
    rows = max(1, max_tokens // width)
    slices = [slice(start, start + rows) for start in range(0, len(feeds), rows)]
    return torch.cat([_feed(target, cache, _Rows(feeds[s], lengths[s], s.start), longest, max_tokens) for s in slices])


class _Rows(NamedTuple):
    """A slice of the batch."""

    feeds: Sequence[Sequence[int]]
    lengths: Sequence[int]
    first_slot: int


def _feed(target: Target, cache: SlotCache, rows: _Rows, longest: int, max_tokens: int) -> Float[Tensor, "B V"]:
    """Feeds one slice; all slices see the same `longest`, so that the cache's swaps cover every row."""
    width = max(map(len, rows.feeds))
    device = target.device
    tokens = torch.tensor([[*[0] * (width - len(feed)), *feed] for feed in rows.feeds], device=device)
    padding = width - torch.tensor([len(feed) for feed in rows.feeds], device=device)[:, None]
    column = torch.arange(width, device=device)
    ends = torch.tensor(rows.lengths, device=device)[:, None]
    positions = torch.where(column < padding, longest - width + column, ends - width + column)
    pieces = [
        target.forward(piece, places, cache, longest=longest, first_slot=rows.first_slot, last_only=True).logits
        for piece, places in zip(tokens.split(max_tokens, dim=1), positions.split(max_tokens, dim=1), strict=True)
    ]
    return pieces[-1][:, -1]

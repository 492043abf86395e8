"""Feeding a cache with what it lacks: prompts, and the tokens that a draft model has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.models.cache import SlotCache
from ace_learn.models.observer import Observer
from ace_learn.models.target import Target

MAX_TOKENS = 16_384
"""Tokens of one forward, padding included; bounds the memory of a prefill (activations and attention masks)."""


class Piece(NamedTuple):
    """A part of what is fed: some columns of a slice of rows, padded on the left."""

    tokens: Int[Tensor, "B Q"]
    positions: Int[Tensor, "B Q"]
    padding: Int[Tensor, " B"]
    """Columns of padding at the start of each row."""
    first_slot: int
    longest: int
    ends: bool
    """Whether the rows' last tokens are in it."""


def pieces(
    feeds: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device, *, max_tokens: int = MAX_TOKENS
) -> Iterator[Piece]:
    """Cuts ragged rows into rectangles of at most `max_tokens`: slices of rows, and a long row in pieces.

    Padding is placed behind the longest sequence, where the positions' mask hides it until it is overwritten. All
    pieces have the same `longest`, so that a cache's swaps cover every row.

    Args:
        feeds: The tokens of each row, at least one.
        lengths: One more than the position of each row's last token.
        device: Where the tensors go.
        max_tokens: Most tokens of one piece, padding included.
    """
    width, ragged = max(map(len, feeds)), len(set(map(len, feeds))) > 1
    longest = max(lengths) + width * ragged
    rows = max(1, max_tokens // width)
    column = torch.arange(width, device=device)
    for start in range(0, len(feeds), rows):
        rectangle = [[*[0] * (width - len(feed)), *feed] for feed in feeds[start : start + rows]]
        tokens = torch.tensor(rectangle, device=device)
        padding = width - torch.tensor([len(feed) for feed in feeds[start : start + rows]], device=device)
        ends = torch.tensor(lengths[start : start + rows], device=device)[:, None]
        positions = torch.where(column < padding[:, None], longest - width + column, ends - width + column)
        for left in range(0, width, max_tokens):
            part = slice(left, min(left + max_tokens, width))
            yield Piece(
                tokens=tokens[:, part],
                positions=positions[:, part],
                padding=(padding - left).clamp(0, part.stop - left),
                first_slot=start,
                longest=longest,
                ends=left + max_tokens >= width,
            )


@torch.inference_mode()
def catch_up(
    target: Target,
    cache: SlotCache,
    feeds: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
    taps: Sequence[int] = (),
    observer: Observer | None = None,
) -> Float[Tensor, "B V"]:
    """Feeds every slot the newest tokens of its sequence; returns the logits behind each last token.

    Args:
        target: The model.
        cache: Its cache; row i of the batch is slot i.
        feeds: The tokens to run, at least one per row; they end the row's sequence.
        lengths: Length of each sequence, fed tokens included.
        max_tokens: Most tokens of one forward.
        taps: Layers whose hidden states the observer sees.
        observer: Sees them; None: nobody does.
    """
    logits = []
    for piece in pieces(feeds, lengths, target.device, max_tokens=max_tokens):
        outputs = target.forward(
            piece.tokens,
            piece.positions,
            cache,
            longest=piece.longest,
            first_slot=piece.first_slot,
            aux_layers=taps,
            last_only=True,
        )
        if observer is not None:
            observer.observe(piece.positions, outputs.aux, longest=piece.longest, first_slot=piece.first_slot)
        if piece.ends:
            logits.append(outputs.logits[:, -1])
    return torch.cat(logits)

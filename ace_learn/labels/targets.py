"""Minimal reasoning of a trace, and what a head learns at each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.features.minimal import way_to

Minimal = Literal["first", "stable"]


class MinimalBoundary(NamedTuple):
    """Indices into a trace's boundaries; the number of boundaries stands for the natural end."""

    first: int
    """First boundary whose answer matches."""
    stable: int
    """First boundary from which on all answers match; -1: not known."""


def minimal_boundary(matches: Sequence[bool | None]) -> MinimalBoundary:
    """Finds b* among the boundaries' matches with the full answer.

    The natural end matches itself, so it is the fallback of both. Where a match is unknown (None), it must lie behind
    the first one that is known, and `stable` is -1: nobody knows it.
    """
    end = len(matches)
    first = next((i for i, match in enumerate(matches) if match), end)
    stable = next((i + 1 for i in range(end - 1, -1, -1) if not matches[i]), 0)
    return MinimalBoundary(first, -1 if None in matches else stable)


def targets(
    *,
    position: Int[Tensor, " N"],
    confidence: Float[Tensor, " N"],
    boundary: Int[Tensor, " N"],
    match_rate: Sequence[float | None],
    minimal_position: int,
) -> Float[Tensor, "N S"]:
    """Targets of DESIGN 4 at tokens of one trace, columns in the order of `LEARNED`.

    Args:
        position: 0-based token index t from the think start.
        confidence: Geometric mean of the probabilities of the paragraph up to t.
        boundary: Index of the boundary that the token is, or -1.
        match_rate: How often exiting at each boundary keeps the full answer, in [0, 1]; None: not known.
        minimal_position: Token index of b*.

    Returns:
        confidence; progress = min(1, (t + 1) / (b* + 1)); remaining = max(0, b* - t) tokens; consistency = match rate
        (NaN off boundaries, and where it is unknown).
    """
    way = way_to(minimal_position, position)
    rates = [torch.nan if rate is None else rate for rate in match_rate]
    consistency = torch.tensor([*rates, torch.nan], dtype=torch.float32)  # index -1 reads the NaN
    return torch.stack((confidence.float(), way.progress, way.remaining, consistency[boundary]), dim=-1)

"""Counter-based sampling noise.

Every draw is a hash of (seed, request, position, stream, index), so it does not depend on the batch, on the number of
tokens per step, or on what was drawn before. A replayed, an exited and a full run of a request see the same noise at
the same position, and can be compared token for token.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_STREAMS = 16
"""Room for further streams; changing it would change every draw."""


class Stream(IntEnum):
    """Independent uses of noise at one position."""

    TOKEN = 0
    ACCEPT = 1
    DRAFT = 2


def _shift_right(x: Int[Tensor, "*n"], bits: int) -> Int[Tensor, "*n"]:
    """Logical (unsigned) right shift of 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping 64-bit arithmetic."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(
    *, seed: int, request: Int[Tensor, " B"], position: Int[Tensor, "B R"], stream: Stream, size: int
) -> Float[Tensor, "B R size"]:
    """Uniform draws in (0, 1), double precision.

    Args:
        seed: Seed of the run.
        request: Key of each request.
        position: Sequence position that each draw decides.
        stream: What the draw is used for.
        size: Draws per position.
    """
    key = _mix(torch.full_like(request, seed) + _GOLDEN)
    key = _mix(key + request * _GOLDEN)[:, None]
    key = _mix(key + (position * _STREAMS + int(stream)) * _GOLDEN)[..., None]
    index = torch.arange(1, size + 1, device=request.device)
    bits = _mix(key + index * _GOLDEN)
    return (_shift_right(bits, 11).double() + 0.5) * 2.0**-53


def gumbel(
    *,
    seed: int,
    request: Int[Tensor, " B"],
    position: Int[Tensor, "B R"],
    size: int,
    stream: Stream = Stream.TOKEN,
) -> Float[Tensor, "B R size"]:
    """Standard Gumbel draws: argmax(log p + gumbel) samples from p; the arguments are those of `uniform`."""
    drawn = uniform(seed=seed, request=request, position=position, stream=stream, size=size)
    return drawn.log_().neg_().log_().neg_()

"""Which rows of the unrolled steps have something to predict, what, and what the signal rows learn.

A trace has tokens x_0 .. x_{T-1}, the target's states h_i behind x_i, and its distributions q_i of x_{i+1}. At
generation a draft starts behind a verified position i: it reads h_i with x_{i+1} and proposes x_{i+2}; then it reads
its own state of that step with x_{i+2}, at position i + 1, and proposes x_{i+3}. Column i of unrolled step j therefore

    stands at position i + j, reads x_{i+j+1}, and is to say q_{i+j+1}, the target's law of x_{i+j+2}.

Drafting starts at the last prompt token: i >= prompt length - 1. The token that is predicted must be there.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def shifted(values: Shaped[Tensor, "B T *rest"], by: int) -> Shaped[Tensor, "B T *rest"]:
    """Column i + `by` in column i; the last columns, which have none, repeat the last one."""
    columns = torch.arange(values.shape[1], device=values.device).add(by).clamp_max(values.shape[1] - 1)
    return values[:, columns]


def trained_rows(
    lengths: Int[Tensor, " B"], prompt_lengths: Int[Tensor, " B"], *, width: int, step: int
) -> Bool[Tensor, "B T"]:
    """The columns of a step that have something to predict: i >= prompt length - 1 and i + step + 2 < T.

    Args:
        lengths: Tokens of each trace.
        prompt_lengths: Prompt tokens of each.
        width: Columns of the batch.
        step: j, counted from 0.
    """
    columns = torch.arange(width, device=lengths.device)
    return (columns >= prompt_lengths[:, None] - 1) & (columns + step + 2 < lengths[:, None])


def signal_targets(targets: Float[Tensor, "B T S"], offset: int) -> Float[Tensor, "B T S"]:
    """What the signal rows learn in each column of step 0: the targets of token i + `offset`, nan where there is none.

    Args:
        targets: Targets at each token, nan where undefined.
        offset: 1 for the newest token that the column has read.
    """
    moved = shifted(targets, offset)
    moved[:, -offset:] = torch.nan
    return moved

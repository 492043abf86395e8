"""Keeps forced rows out of the labels of vLLM's online acceptance estimator (adaptive verification of V2 runners).

What a forced row accepts or rejects says nothing of how well the drafter predicts the target, be it forced by an exit
or by vLLM's own thinking budget. Private names of vLLM that are touched here: `speculator.acceptance_estimator` and its
`step` (on the instance).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor], None]
"""`OnlineAcceptanceEstimator.step(idx_mapping, num_sampled, num_rejected)`."""


class Graded(NamedTuple):
    """How many tokens of each request count as sampled and as rejected."""

    num_sampled: Int[Tensor, " B"]
    num_rejected: Int[Tensor, " B"]


def before_forced(
    num_sampled: Int[Tensor, " B"], num_rejected: Int[Tensor, " B"], first_forced: Int[Tensor, " B"]
) -> Graded:
    """Counts under which only drafts in front of the first forced row are labels.

    vLLM takes drafts 0 to a as labels, where a = num_sampled - 1 were accepted and, if one was rejected, draft a too.
    A draft is judged by the row of the same number.

    Args:
        num_sampled: Tokens sampled, the bonus or corrected one included; 0 in the middle of a prompt.
        num_rejected: Drafts rejected.
        first_forced: The first forced row of each request; at least the number of rows where there is none.
    """
    accepted = (num_sampled - 1).clamp_min(0)
    reached = accepted >= first_forced
    return Graded(
        num_sampled=torch.where(reached, first_forced + 1, num_sampled).to(num_sampled.dtype),
        num_rejected=torch.where(reached, 0, num_rejected).to(num_rejected.dtype),
    )


def first_forced_rows(forced: Int[Tensor, " R"], local: Int[Tensor, " R"], requests: int) -> Int[Tensor, " B"]:
    """The first forced row of each request of a step; R where none is forced.

    Args:
        forced: Token forced behind each row, or -1; the rows of a request stand together.
        local: Which of its request's rows each is.
        requests: B.
    """
    request = (local == 0).long().cumsum(0) - 1
    row = torch.where(forced >= 0, local.long(), len(local))
    return row.new_full((requests,), len(local)).scatter_reduce_(0, request, row, "amin")


def grading(step: Step, first_forced: Callable[[Tensor], Tensor | None]) -> Step:
    """`step` with forced rows left out.

    Args:
        step: The estimator's own.
        first_forced: Maps the requests of a step to their first forced rows; None: nothing is forced.
    """

    def graded(idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        first = first_forced(idx_mapping)
        if first is not None:
            num_sampled, num_rejected = before_forced(num_sampled, num_rejected, first)
        step(idx_mapping, num_sampled, num_rejected)

    return graded

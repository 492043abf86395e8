"""A fault that the proofs must find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from jaxtyping import Int
from torch import Tensor

from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.rows import StepRows


@contextmanager
def late_rows() -> Iterator[None]:
    """Within a verify step an exit is forced one row too late; steps of one row, as without drafts, are right."""
    right = ExitHook.observe

    def observe(self: ExitHook, rows: StepRows) -> Int[Tensor, " R"] | None:
        forced = right(self, rows)
        return None if forced is None else torch.cat([_late(own) for own in forced.split(rows.counts.tolist())])

    with patch.object(ExitHook, "observe", observe):
        yield


def _late(forced: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """What follows the rows of a request; there is nothing behind the last one that it could be moved to."""
    moved = forced.new_full(forced.shape, -1)
    moved[1:] = forced[:-1]
    moved[-1] = torch.maximum(moved[-1], forced[-1])
    return moved

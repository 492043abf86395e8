"""The logits rows of a step, of all its requests one after another, and the grid that some of them make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.slots import NOWHERE, to_device


class RowTensors(NamedTuple):
    """What the device knows of the rows of a step."""

    tokens: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    hidden: Float[Tensor, "R H"]
    logits: Float[Tensor, "R V"]
    aux: Float[Tensor, "R A"] | None
    allowed: Bool[Tensor, "R E"] | None

    def map(self, change: Callable[[Tensor], Tensor]) -> RowTensors:
        """The same with every tensor changed."""
        return RowTensors(
            tokens=change(self.tokens),
            positions=change(self.positions),
            hidden=change(self.hidden),
            logits=change(self.logits),
            aux=None if self.aux is None else change(self.aux),
            allowed=None if self.allowed is None else change(self.allowed),
        )


class StepRows(NamedTuple):
    """What a runner knows of a step between the target's forward pass and sampling.

    Row 0 of a request holds its last committed token, the rows behind it drafted tokens, at ascending positions.
    """

    request_ids: Sequence[str]
    """B requests, in the order of their rows."""
    counts: Int[np.ndarray, " B"]
    """Rows of each request, on the host. Where `starts` is given, only their sum and the longest one count."""
    tokens: Int[Tensor, " R"]
    """Input token of each row; -1 for a placeholder."""
    positions: Int[Tensor, " R"]
    """Position of each row in its request's prompt and output together."""
    hidden: Float[Tensor, "R H"]
    """What the target's output layer reads."""
    logits: Float[Tensor, "R V"]
    """Raw: before temperature, penalties, masks. Never changed."""
    aux: Float[Tensor, "R A"] | None = None
    """The tapped layers, concatenated; needed where `ExitHook.reads_aux`."""
    allowed: Bool[Tensor, "R E"] | None = None
    """Whether the grammar allows each token of the think end after each row; None: no grammar."""
    starts: Int[Tensor, " B+1"] | None = None
    """First row of each request and R, on the device, where the host does not know the counts (adaptive
    verification)."""

    def tensors(self) -> RowTensors:
        """Its tensors with a row for every logits row."""
        return RowTensors(self.tokens, self.positions, self.hidden, self.logits, self.aux, self.allowed)

    def check(self) -> None:
        """Refuses what does not fit together.

        Raises:
            ValueError: Names what has another number of rows than the tokens.
        """
        size, given = len(self.tokens), int(self.counts.sum())
        if given != size or len(self.counts) != len(self.request_ids):
            raise ValueError(
                f"{len(self.request_ids)} requests with {given} rows in {len(self.counts)} counts, but {size} tokens"
            )
        if any(field is not None and len(field) != size for field in self.tensors()):
            sizes = {name: len(field) for name, field in self.tensors()._asdict().items() if field is not None}
            wrong = {name: length for name, length in sizes.items() if length != size}
            raise ValueError(f"{size} tokens, but rows of {wrong}")


class Layout(NamedTuple):
    """Some requests of a step as a grid [B, W], a row of logits per cell."""

    slots: Int[Tensor, " B"]
    """Of the requests."""
    real: Bool[Tensor, "B W"]
    """Where a cell holds a row of its own; elsewhere it repeats a row that another cell holds."""
    places: Int[Tensor, "B W"] | None
    """Which of the step's R rows a cell holds; None: all of them, one after another."""
    chosen: Int[Tensor, " N"] | None
    """The rows that cells hold, each once; None: all of them."""

    @classmethod
    def of(cls, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Layout:
        """The layout of the picked requests, made on the host and copied in one piece.

        Args:
            rows: The step.
            picks: Which of its requests, ascending.
            slots: Of the picked requests.
        """
        if rows.starts is not None:
            return cls.planned(plan_of(rows, picks, slots, int(rows.counts.max())))
        counts, device = rows.counts[picks], rows.tokens.device
        width, size = int(counts.max()), int(counts.sum())
        everything = size == len(rows.tokens)
        if everything and size == len(picks) * width:
            own = torch.from_numpy(np.asarray(slots, dtype=np.int64))
            real = torch.ones(len(picks), width, dtype=torch.bool, device=device)
            return cls(to_device(own, device), real, None, None)
        chosen = None if everything else to_device(torch.from_numpy(_rows_of(rows.counts, picks)), device)
        return cls.planned(plan_of(rows, picks, slots, width))._replace(chosen=chosen)

    @classmethod
    def planned(cls, plan: Int[Tensor, "3 B W"]) -> Layout:
        """The layout that `plan_of` made, of all rows."""
        slots, real, places = plan.unbind()
        return cls(slots[:, 0], real > 0, places, None)

    def gather(self, values: Tensor) -> Tensor:
        """Of the step's values [R, ...], those of the grid [B, W, ...]."""
        return values.unflatten(0, self.real.shape) if self.places is None else values[self.places]

    def spread(self, values: Int[Tensor, "B W"], size: int) -> Int[Tensor, " R"]:
        """Values of the grid among all `size` rows of the step, -1 elsewhere."""
        if self.places is None:
            return values.flatten()
        targets = torch.where(self.real, self.places, size)
        return values.new_full((size + 1,), -1).scatter_(0, targets.flatten(), values.flatten())[:size]


def plan_of(
    rows: StepRows, picks: Sequence[int], slots: Sequence[int], width: int, *, height: int = 1
) -> Int[Tensor, "3 B W"]:
    """Slot, whether it is real, and row of every cell of a grid, as one tensor on the device.

    Args:
        rows: The step.
        picks: Which of its requests, ascending. Where the host does not know whose rows are whose, the grid has all
            requests, the others with slot 0.
        slots: Of the picked requests.
        width: W.
        height: B at least; what is added has slot 0, and no real row.
    """
    if rows.starts is not None:
        return _plan_on_device(rows, picks, slots, width, height)
    plan = np.zeros((3, max(len(picks), height), width), dtype=np.int64)
    column, mine = np.arange(width), slice(len(picks))
    plan[0, mine] = np.asarray(slots)[:, None]
    plan[1, mine] = column < rows.counts[picks][:, None]
    plan[2, mine] = (np.cumsum(rows.counts) - rows.counts)[picks][:, None] + column * plan[1, mine]
    return to_device(torch.from_numpy(plan), rows.tokens.device)


def _plan_on_device(
    rows: StepRows, picks: Sequence[int], slots: Sequence[int], width: int, height: int
) -> Int[Tensor, "3 B W"]:
    assert rows.starts is not None
    starts, device = rows.starts.long(), rows.tokens.device
    own = np.full(max(len(rows.counts), height), NOWHERE, dtype=np.int64)
    own[picks] = slots
    starts = torch.cat((starts, starts[-1:].expand(len(own) - len(rows.counts))))
    column = torch.arange(width, device=device)
    real = column < starts.diff()[:, None]
    places = torch.where(real, starts[:-1, None] + column, 0)
    return torch.stack((to_device(torch.from_numpy(own), device)[:, None].expand(real.shape), real.long(), places))


def _rows_of(counts: Int[np.ndarray, " B"], picks: Sequence[int]) -> Int[np.ndarray, " N"]:
    """The rows of the picked requests."""
    mine = np.zeros(len(counts), dtype=bool)
    mine[picks] = True
    return np.flatnonzero(np.repeat(mine, counts))

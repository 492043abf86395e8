"""The logits rows of a step, of all its requests one after another, and the grid that some of them make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.slots import to_device


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
        sizes = {name: len(value) for name, value in self._asdict().items() if isinstance(value, Tensor)}
        wrong = {name: length for name, length in sizes.items() if name != "starts" and length != size}
        if wrong:
            raise ValueError(f"{size} tokens, but rows of {wrong}")


class Layout:
    """The rows of some requests of a step: N rows one after another, and the same as a grid [B, W].

    Attributes:
        slots: Of the requests.
        chosen: Which N of the step's R rows; None: all of them.
        first: Which of the N rows is each request's first one.
        real: Where the grid holds a row; elsewhere it repeats the request's first row.
    """

    def __init__(
        self,
        slots: Int[Tensor, " B"],
        chosen: Int[Tensor, " N"] | None,
        grid: Int[Tensor, "B W"] | None,
        cells: Int[Tensor, " N"] | None,
        real: Bool[Tensor, "B W"],
    ) -> None:
        """Use `of`; `grid` and `cells` are None where every request has W rows."""
        self.slots, self.chosen, self.real = slots, chosen, real
        self._grid, self._cells = grid, cells
        if grid is None:
            self.first = torch.arange(0, real.numel(), real.shape[1], device=real.device)
        else:
            self.first = grid[:, 0]

    @classmethod
    def of(cls, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Layout:
        """The layout of the picked requests, made on the host and copied in one piece.

        Args:
            rows: The step.
            picks: Which of its requests, ascending.
            slots: Of the picked requests.
        """
        device = rows.tokens.device
        if rows.starts is not None:
            return cls._on_device(rows, picks, slots)
        counts = rows.counts[picks]
        width, size = int(counts.max()), int(counts.sum())
        column = np.arange(width)
        real = column < counts[:, None]
        everything = size == len(rows.tokens)
        even = size == real.size
        parts = [np.asarray(slots)]
        if not everything:
            first = (np.cumsum(rows.counts) - rows.counts)[picks]
            parts.append((first[:, None] + column)[real])
        if not even:
            start = np.cumsum(counts) - counts
            parts += [(start[:, None] + np.where(real, column, 0)).ravel(), np.flatnonzero(real), real.ravel()]
        sizes = [len(part) for part in parts]
        found = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64)), device).split(sizes)
        own, *rest = found
        chosen = None if everything else rest.pop(0)
        if even:
            return cls(own, chosen, None, None, torch.ones(real.shape, dtype=torch.bool, device=device))
        grid, cells, real_cells = rest
        return cls(own, chosen, grid.view(real.shape), cells, real_cells.view(real.shape) > 0)

    def single(self, index: int, count: int) -> Layout:
        """The layout of one of the requests, which has `count` rows."""
        real = torch.ones(1, count, dtype=torch.bool, device=self.real.device)
        return Layout(self.slots[index : index + 1], None, None, None, real)

    @classmethod
    def _on_device(cls, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Layout:
        """All rows are taken, those of other requests with slot 0, since the host does not know whose they are."""
        assert rows.starts is not None
        starts, device = rows.starts.long(), rows.tokens.device
        every = np.zeros(len(rows.counts), dtype=np.int64)
        every[picks] = slots
        width = int(rows.counts.max())
        column = torch.arange(width, device=device)
        real = column < (starts[1:] - starts[:-1])[:, None]
        index = torch.arange(len(rows.tokens), device=device)
        owner = torch.searchsorted(starts[1:].contiguous(), index, right=True)
        return cls(
            to_device(torch.from_numpy(every), device),
            None,
            starts[:-1, None] + torch.where(real, column, 0),
            owner * width + index - starts[owner],
            real,
        )

    def gather(self, values: Tensor) -> Tensor:
        """Of the step's values [R, ...], those of the N rows."""
        return values if self.chosen is None else values[self.chosen]

    def to_grid(self, values: Tensor) -> Tensor:
        """Values [N, ...] of the rows as a grid [B, W, ...]."""
        return values.unflatten(0, self.real.shape) if self._grid is None else values[self._grid]

    def to_rows(self, values: Tensor) -> Tensor:
        """Values [B, W, ...] of the grid as rows [N, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._cells is None else flat[self._cells]

    def spread(self, values: Int[Tensor, " N"], size: int) -> Int[Tensor, " R"]:
        """Values of the N rows among all `size` rows of the step, -1 elsewhere."""
        if self.chosen is None:
            return values
        return values.new_full((size,), -1).index_copy_(0, self.chosen, values)

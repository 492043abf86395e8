"""The drafter's hidden states over verified tokens, by position: written with each proposal, read some steps later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.slots import NOWHERE, PositionRing, SlotTable
from ace_learn.speculation.drafters import DraftStates


class DraftedRows(NamedTuple):
    """The tokens of a step that a drafter has run, those of one request after another.

    The drafter's row at a position reads the target's hidden state there and the token behind it.
    """

    hidden: Float[Tensor, "T E"]
    """What the drafter's output layer reads; further rows are padding."""
    positions: Int[Tensor, " T"]
    first: Int[Tensor, " B"]
    """First row of each request."""
    last: Int[Tensor, " B"]
    """Its last row behind which the next token is verified; the ones after it are rejected drafts."""
    longest: int
    """Most rows of a request."""


class DraftedStates:
    """What rows read of the drafter: its state `delay` positions before them, zeros before the first position.

    That is always there by then, unless the drafter was not run: then nothing is said of the row.
    """

    def __init__(self, states: DraftStates, window: int) -> None:
        """Holds nothing yet.

        Args:
            states: What the head reads.
            window: Positions of each slot that are kept: `states.delay`, and those in flight.
        """
        self.states, self._window = states, window
        self._ring: PositionRing | None = None

    def keep(self, rows: DraftedRows, slots: Int[Tensor, " B"], table: SlotTable) -> None:
        """Keeps the newest states of each request.

        Tokens that run again after a preemption do not take the place of later ones.

        Args:
            rows: What was run.
            slots: Of the requests; `NOWHERE`: not followed.
            table: To which the ring belongs.

        Raises:
            ValueError: The drafter's hidden size is not the one that the head was trained with.
        """
        if rows.hidden.shape[1] != self.states.size:
            raise ValueError(
                f"the drafter's hidden size is {rows.hidden.shape[1]}, and the head was trained with {self.states.size}"
            )
        ring = self.prepare(rows.hidden, table)
        width = min(rows.longest, self._window)
        index = rows.last[:, None] - torch.arange(width - 1, -1, -1, device=slots.device)
        mine = index >= rows.first[:, None]
        index = index.clamp_min(0)
        positions = rows.positions[index]
        mine = mine & ring.latest(slots, positions)
        places = torch.where(mine, slots[:, None], NOWHERE)
        hidden = rows.hidden[index.flatten()].to(ring.values[0])
        ring.store(places.flatten(), positions.flatten(), hidden)

    def prepare(self, like: Float[Tensor, "_ _"], table: SlotTable) -> PositionRing:
        """The ring, made where there is none yet, for states of the type of `like`."""
        if self._ring is None:
            self._ring = PositionRing(self._window, ((self.states.size,), like.dtype), device=like.device)
            while len(self._ring.held) < len(table.settings):
                self._ring.grow()
            table.rings.append(self._ring)
        return self._ring

    def read(
        self, slots: Int[Tensor, " B"], positions: Int[Tensor, "B W"], table: SlotTable
    ) -> tuple[Float[Tensor, "B W E"], Bool[Tensor, "B W"]]:
        """The state that each row reads, and whether it is there, or not needed: rows of a prompt have no signals."""
        assert self._ring is not None, "prepared before the first rows are read"
        before = positions - self.states.delay
        there = (before < 0) | (positions < table.settings[slots, :1])
        (hidden,), held = self._ring.load(slots[:, None].expand_as(before), before)
        return torch.where((before < 0)[..., None], 0, hidden), there | held

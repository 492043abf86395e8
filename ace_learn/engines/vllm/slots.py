"""Device-side state of requests: rings by position, one per slot. Slots are ours, not vLLM's, which a preemption frees.

Slot 0 belongs to nobody: what must not be written goes there, so that no write needs a mask that the host would have to
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.exit.state import Decision, Span

NOWHERE = 0
"""The slot of writes that are not to happen."""

_FIRST_SIZE = 16
_NO_POSITION = -2
"""Not -1, which is the position before a prompt's first token."""


class PositionRing:
    """Values by slot and position, the latest `window` positions of each slot."""

    def __init__(self, window: int, *values: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> None:
        """Holds nothing yet.

        Args:
            window: Positions held of each slot.
            values: Shape and type of each value.
            device: Where they are held.
        """
        self.window = window
        self.held = torch.full((_FIRST_SIZE, window), _NO_POSITION, dtype=torch.long, device=device)
        self.values = [torch.zeros(_FIRST_SIZE, window, *shape, dtype=kind, device=device) for shape, kind in values]

    def grow(self) -> None:
        """Doubles the number of slots."""
        self.held = torch.cat((self.held, torch.full_like(self.held, _NO_POSITION)))
        self.values = [torch.cat((value, torch.zeros_like(value))) for value in self.values]

    def clear(self, slots: Int[Tensor, " B"]) -> None:
        """Forgets what slots hold."""
        self.held[slots] = _NO_POSITION

    def load(
        self, slots: Int[Tensor, "*rows"], positions: Int[Tensor, "*rows"]
    ) -> tuple[list[Tensor], Bool[Tensor, "*rows"]]:
        """The values [*rows, ...] at positions, and which of them are held; the others are arbitrary."""
        place = positions % self.window
        return [value[slots, place] for value in self.values], self.held[slots, place] == positions

    def latest(self, slots: Int[Tensor, " B"], positions: Int[Tensor, "B W"]) -> Bool[Tensor, "B W"]:
        """Whether no later position is held where these would be written."""
        return self.held[slots[:, None], positions % self.window] <= positions

    def store(self, slots: Int[Tensor, " N"], positions: Int[Tensor, " N"], *values: Tensor) -> None:
        """Writes values [N, ...]; N different pairs of slot and position, but for the slot `NOWHERE`."""
        place = positions % self.window
        for held, value in zip(self.values, values, strict=True):
            held[slots, place] = value
        self.held[slots, place] = positions
        self.held[NOWHERE] = _NO_POSITION


class SlotTable:
    """The states of the requests that are followed."""

    def __init__(
        self, *, state_size: int, num_settings: int, window: int, device: torch.device, num_requests: int = 1
    ) -> None:
        """Follows nobody yet.

        Args:
            state_size: Numbers of a state, D.
            num_settings: Numbers that stay with a request, C.
            window: Positions of each slot whose state is kept.
            device: Where the states are.
            num_requests: Requests that there is room for from the start; for more, everything is copied.
        """
        self.device = device
        self.states = PositionRing(window, ((state_size,), torch.float32), device=device)
        self.settings = torch.zeros(_FIRST_SIZE, num_settings, device=device)
        self.counted = torch.zeros(_FIRST_SIZE, dtype=torch.bool, device=device)
        """Whether a slot's failure has been counted."""
        self.rings = [self.states]
        self._free = list(range(_FIRST_SIZE - 1, NOWHERE, -1))
        self._admitted: list[tuple[float, ...]] = []
        while len(self._free) < num_requests:
            self._grow()

    @property
    def full(self) -> bool:
        """Whether one more request takes more room."""
        return not self._free

    def take(self) -> int:
        """A free slot."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        size = len(self.settings)
        for ring in self.rings:
            ring.grow()
        self.settings = torch.cat((self.settings, torch.zeros_like(self.settings)))
        self.counted = torch.cat((self.counted, torch.zeros_like(self.counted)))
        self._free = [*range(2 * size - 1, size - 1, -1), *self._free]

    def release(self, slot: int) -> None:
        """Frees a slot."""
        self._admitted = [entry for entry in self._admitted if entry[0] != slot]
        self._free.append(slot)

    def admit(self, slot: int, prompt_length: int, settings: Sequence[float], *, in_think: bool) -> None:
        """Clears a slot for a new request; takes effect with the next `flush`.

        Args:
            slot: Which slot.
            prompt_length: Tokens of the prompt.
            settings: What stays with the request.
            in_think: Whether the prompt leaves a think block open.
        """
        self._admitted.append((slot, prompt_length - 1, in_think, *settings))

    def flush(self) -> None:
        """Brings the new requests to the device, together."""
        if not self._admitted:
            return
        entries = to_device(torch.tensor(self._admitted, dtype=torch.float64), self.device)
        self._admitted = []
        slots, last = entries[:, 0].long(), entries[:, 1].long()
        initial = entries[:, 2].float()
        for ring in self.rings:
            ring.clear(slots)
        state = torch.cat((Span.initial(initial).pack(), Decision.initial(initial).pack()), dim=-1)
        self.states.store(slots, last, state)
        self.settings[slots] = entries[:, 3:].float()
        self.counted[slots] = False

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return len(self.settings) - 1 - len(self._free)


class HiddenRing(PositionRing):
    """The hidden state after each position, and the log-sum-exp of the logits there.

    Made when the first rows show size and type of a hidden state.
    """

    def __init__(self, window: int, num_slots: int, like: Float[Tensor, "R H"]) -> None:
        """Holds nothing yet; `like` is any hidden state."""
        super().__init__(window, ((like.shape[1],), like.dtype), ((), torch.float32), device=like.device)
        while len(self.held) < num_slots:
            self.grow()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host without waiting for the device."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)

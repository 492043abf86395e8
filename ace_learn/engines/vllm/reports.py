"""What leaves the device about a step: one vector, copied without waiting, and read on the host later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.events import ExitEvent
from ace_learn.engines.vllm.judge import Judged
from ace_learn.signals import SIGNALS

_FORCED, _SHADOWED, _BLOCKED = 1, 2, 3
_ROW_SIZE = 4 + len(SIGNALS)
_REQUEST_SIZE = 3


@dataclass(slots=True)
class Followed:
    """A request that the hook follows."""

    request_id: str
    slot: int
    prompt_length: int
    forces: bool
    """False in shadow mode."""
    active: bool = True
    """False once its thinking is over or its exits were given up: its rows are left alone."""
    over_since: int | None = None
    """Position of the first row seen behind the thinking."""


class Findings(NamedTuple):
    """What the host learns of a step."""

    exits: list[ExitEvent]
    blocked: list[tuple[str, int]]
    broken: list[Followed]
    """A signal that the policy reads is NaN, seen for the first time."""
    over: list[tuple[Followed, int | None]]
    """Requests with the position of their first row, where it stands behind the thinking, or None."""

    @classmethod
    def none(cls) -> Findings:
        """Nothing, to be added to."""
        return cls([], [], [], [])


class DevicePart(NamedTuple):
    """What came of a step on the device."""

    owners: list[Followed | None]
    """Of the layout's requests; None for one that is not followed."""
    values: Tensor
    """What `pack` gave, on the host once the step's copies are done; requests behind the owners are nobody's."""
    buffers: HostBuffers
    """Where `values` is from."""

    def read(self) -> Findings:
        """What the values say."""
        found = Findings.none()
        values = self.values.numpy()[: len(self.owners)]
        rows = values[:, :-_REQUEST_SIZE].reshape(len(values), -1, _ROW_SIZE)
        for index, row in np.argwhere(rows[..., 0] > 0).tolist():
            owner = self.owners[index]
            if owner is not None:
                _read_row(found, owner, row, rows[index, row].tolist())
        requests = values[:, -_REQUEST_SIZE:].tolist()
        for owner, (broken, over, first) in zip(self.owners, requests, strict=True):
            if owner is None:
                continue
            if broken:
                found.broken.append(owner)
            if over or owner.over_since is not None:
                found.over.append((owner, int(first) if over else None))
        self.buffers.give_back(self.values)
        return found


def _read_row(found: Findings, owner: Followed, row: int, values: list[float]) -> None:
    code, position, thought, paragraphs, *signals = values
    if code == _BLOCKED:
        found.blocked.append((owner.request_id, row))
        return
    event = ExitEvent(
        request_id=owner.request_id,
        row=row,
        position=int(position),
        tokens_thought=int(thought),
        paragraphs=int(paragraphs),
        signals=tuple(signals),
        forced=code == _FORCED,
    )
    found.exits.append(event)


def pack(judged: Judged, positions: Int[Tensor, "B W"], broken: Bool[Tensor, " B"]) -> Float[Tensor, "B D"]:
    """What the host is to learn of each request of a step.

    Args:
        judged: What the rule says.
        positions: Of the rows.
        broken: Requests whose failure is to be counted.
    """
    code = torch.where(judged.forces, float(_FORCED), float(_SHADOWED))[:, None] * judged.fired
    code = torch.where(judged.blocked, float(_BLOCKED), code)
    columns = (code, positions.float(), judged.span.tokens, judged.span.paragraphs)
    rows = torch.cat((torch.stack(columns, dim=-1), judged.smoothed), dim=-1)
    requests = torch.stack((broken.float(), judged.over.float(), positions[:, 0].float()), dim=-1)
    return torch.cat((rows.flatten(1), requests), dim=1)


class HostBuffers:
    """Pinned buffers, used again once their step has been reported."""

    def __init__(self, device: torch.device) -> None:
        """Holds no buffer yet; where the device is the host itself, none is needed."""
        self.pinned = device.type != "cpu"
        self._free: list[Tensor] = []

    def copy(self, values: Float[Tensor, "B D"]) -> Tensor:
        """The values on the host, from the moment on at which the device has come so far."""
        if not self.pinned:
            return values
        buffer = self._free.pop() if self._free else values.new_empty(0, device="cpu")
        if len(buffer) < values.numel():
            buffer = torch.empty(2 * values.numel(), pin_memory=True)
        return buffer[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

    def give_back(self, buffer: Tensor) -> None:
        """Makes a buffer free again."""
        if self.pinned:
            self._free.append(buffer.flatten())

"""Rows that can end no paragraph wait for one that can. On a CPU, where looking at a token costs the host nothing."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.thinking import BoundaryTables, ThinkMarkers

_MOST = 16
"""Rows of a request that wait at most, and the one that they wait for."""
_ROOM = 2**28
"""Bytes of logits that may wait."""


def rows_together(num_requests: int, vocab_size: int) -> int:
    """Rows of a request that may be looked at together."""
    return max(1, min(_MOST, _ROOM // (4 * num_requests * vocab_size)))


class ThinkingRows(NamedTuple):
    """Where a step's rows stand."""

    thinking: Bool[Tensor, " R"]
    """Rows whose next token is thought."""
    open: Bool[Tensor, " R"] | None
    """Those of `thinking` whose request may be forced; None where none may."""


class LastLook:
    """Whether requests thought, and could be forced, when the rule last looked at them."""

    def __init__(self) -> None:
        """Nothing was looked at yet."""
        self._seen: dict[str, tuple[bool, bool]] = {}
        self._latest: tuple[list[tuple[bool, bool]], ThinkingRows | None] = [], None

    def keep(self, request_id: str, thinking: bool, open_: bool) -> None:
        """Notes where a request stands."""
        self._seen[request_id] = thinking, open_

    def drop(self, request_id: str) -> None:
        """Forgets a request."""
        self._seen.pop(request_id, None)

    def rows(self, request_ids: Sequence[str], live: AbstractSet[str]) -> ThinkingRows | None:
        """Where the rows of a step stand, one of each request; of those that are not `live` nothing is known."""
        seen = [self._seen[name] if name in live else (False, False) for name in request_ids]
        if seen != self._latest[0]:  # mostly as in the step before
            thinking, open_ = torch.tensor(seen).unbind(-1)
            self._latest = seen, ThinkingRows(thinking, open_ if any(may for _, may in seen) else None)
        return self._latest[1]


class Member(NamedTuple):
    """A request of a step that is followed, and its row."""

    request_id: str
    place: int
    """In the step."""
    position: int


class _Row(NamedTuple):
    step: RowTensors
    """The step that it came in."""
    place: int
    token: int
    position: int


@dataclass
class _Waiting:
    """Rows of a request, at positions one after another."""

    rows: list[_Row] = field(default_factory=list)
    judged: bool = False
    """Whether the rule has looked at them."""


class WaitingRows:
    """Each request's rows since the last one that mattered; for runners without speculation.

    Between two line breaks or markers nothing can be forced and nothing opens or closes the thinking, so the rule may
    pass over these rows when the next one that matters is there. A prompt's rows before its last one never matter.
    """

    def __init__(self, markers: ThinkMarkers, tables: BoundaryTables, *, together: int) -> None:
        """Nothing waits yet.

        Args:
            markers: Think markers of the target.
            tables: Boundary tables of the target.
            together: Rows of a request that are looked at together at most.
        """
        matters = (tables.breaks | tables.newline | tables.ends_newline).numpy().copy()
        matters[[*markers.start, *markers.end]] = True
        self._matters: list[bool] = matters.tolist()
        self._together = together
        self._requests: dict[str, _Waiting] = {}
        self.urgent: set[str] = set()
        """Requests whose rows all matter: behind them the rest of a think end of several tokens is forced."""

    def add(self, rows: StepRows, members: Sequence[Member]) -> list[str]:
        """Lets rows of a step wait; each request has one, and one that is run again waits no second time.

        Returns:
            Requests that can wait no longer.
        """
        assert len(rows.tokens) == len(rows.request_ids), "without speculation a request has one row"
        if not members:
            return []
        tokens, due = rows.tokens.tolist(), []
        step = rows.tensors()._replace(logits=rows.logits.clone())  # samplers change logits in place
        for request_id, place, position in members:
            waiting = self._requests.get(request_id)
            if waiting is not None and position <= waiting.rows[-1].position:
                if waiting.judged and position == waiting.rows[-1].position:
                    due.append(request_id)  # what must follow it was said of a step that was dropped
                continue
            if waiting is None or waiting.judged or position != waiting.rows[-1].position + 1:
                waiting = self._requests[request_id] = _Waiting()
            row = _Row(step, place, tokens[place], position)
            waiting.rows.append(row)
            if self._is_due(request_id, row.token) or len(waiting.rows) == self._together:
                due.append(request_id)
        return due

    def _is_due(self, request_id: str, token: int) -> bool:
        return not 0 <= token < len(self._matters) or self._matters[token] or request_id in self.urgent

    def take(self, request_ids: Sequence[str]) -> StepRows:
        """All rows of some requests, a request's one after another, to be judged."""
        taken = [self._requests[request_id] for request_id in request_ids]
        for waiting in taken:
            waiting.judged = True
        rows = [row for waiting in taken for row in waiting.rows]
        return StepRows(
            request_ids=request_ids,
            counts=np.array([len(waiting.rows) for waiting in taken]),
            tokens=torch.tensor([row.token for row in rows]),
            positions=torch.tensor([row.position for row in rows]),
            hidden=torch.stack([row.step.hidden[row.place] for row in rows]),
            logits=torch.stack([row.step.logits[row.place] for row in rows]),
            aux=_stacked([(row.step.aux, row.place) for row in rows]),
            allowed=_stacked([(row.step.allowed, row.place) for row in rows]),
        )

    def drop(self, request_id: str) -> None:
        """Forgets a request."""
        self._requests.pop(request_id, None)
        self.urgent.discard(request_id)


def _stacked(cells: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Rows of a field that not every step has; ones, where others have it: without a grammar everything is allowed."""
    given = next((values for values, _ in cells if values is not None), None)
    if given is None:
        return None
    return torch.stack([given.new_ones(given.shape[1:]) if values is None else values[i] for values, i in cells])

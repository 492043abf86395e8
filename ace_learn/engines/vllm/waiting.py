"""Rows that can end no paragraph wait for one that can. On a CPU, where looking at a token costs the host nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.thinking import BoundaryTables, ThinkMarkers

WAITING = 8
"""Rows of a request that are looked at together at most."""


class _Row(NamedTuple):
    step: int
    place: int
    token: int
    position: int


class WaitingRows:
    """The rows of the steps since the last one that mattered; for runners without speculation.

    Between two line breaks or markers nothing can be forced and nothing opens or closes the thinking, so the rule may
    see these rows together with the next one that matters. A prompt's rows before its last one never matter.
    """

    def __init__(self, markers: ThinkMarkers, tables: BoundaryTables) -> None:
        """Nothing waits yet."""
        matters = (tables.breaks | tables.newline | tables.ends_newline).numpy().copy()
        matters[[*markers.start, *markers.end]] = True
        self._matters: Bool[np.ndarray, " V"] = matters
        self._steps: list[RowTensors] = []
        self._rows: dict[str, list[_Row]] = {}
        self.urgent: set[str] = set()
        """Requests whose rows all matter: behind them the rest of a think end of several tokens is forced."""
        self.due = False
        """Whether a row that came last matters, or no more can wait."""

    def follows(self, rows: StepRows, places: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether some requests' rows of a step stand right behind those that wait."""
        for place in places:
            waiting = self._rows.get(rows.request_ids[place])
            if waiting and waiting[-1].position + 1 != positions[place]:
                return False
        return True

    def add(self, rows: StepRows, places: Sequence[int], positions: Sequence[int]) -> None:
        """Lets the rows of some requests of a step wait; each request has one.

        Args:
            rows: The step.
            places: Which requests.
            positions: Of all rows, on the host.
        """
        assert len(rows.tokens) == len(rows.request_ids), "without speculation a request has one row"
        if not places:
            return
        tensors = rows.tensors()
        self._steps.append(tensors._replace(logits=tensors.logits.clone()))  # samplers change logits in place
        tokens = rows.tokens.tolist()
        for place in places:
            row = _Row(len(self._steps) - 1, place, tokens[place], positions[place])
            waiting = self._rows.setdefault(rows.request_ids[place], [])
            waiting.append(row)
            known = 0 <= row.token < len(self._matters)
            matters = not known or bool(self._matters[row.token]) or rows.request_ids[place] in self.urgent
            self.due = self.due or matters or len(waiting) == WAITING
        self.due = self.due or len(self._steps) == WAITING

    def take(self) -> StepRows:
        """All that waits, a request's rows one after another."""
        sizes = np.cumsum([0, *(len(step.tokens) for step in self._steps)])
        every = [row for rows in self._rows.values() for row in rows]
        index = torch.tensor([int(sizes[row.step]) + row.place for row in every])
        taken = StepRows(
            request_ids=list(self._rows),
            counts=np.array([len(rows) for rows in self._rows.values()]),
            tokens=torch.cat([step.tokens for step in self._steps])[index],
            positions=torch.cat([step.positions for step in self._steps])[index],
            hidden=torch.cat([step.hidden for step in self._steps])[index],
            logits=torch.cat([step.logits for step in self._steps])[index],
            aux=self._joined([step.aux for step in self._steps], index),
            allowed=self._joined([step.allowed for step in self._steps], index),
        )
        self._steps, self._rows, self.due = [], {}, False
        return taken

    def drop(self, request_id: str) -> None:
        """Forgets a request."""
        self._rows.pop(request_id, None)
        self.urgent.discard(request_id)
        if not self._rows:
            self._steps, self.due = [], False

    def _joined(self, parts: Sequence[Tensor | None], index: Tensor) -> Tensor | None:
        """One field of all steps; a grammar may come and go, and where there is none everything is allowed."""
        given = [part for part in parts if part is not None]
        if not given:
            return None
        whole = [
            given[0].new_ones(len(step.tokens), *given[0].shape[1:]) if part is None else part
            for part, step in zip(parts, self._steps, strict=True)
        ]
        return torch.cat(whole)[index]

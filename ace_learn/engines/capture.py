"""Hidden states and scalars of think rows, kept while a batch decodes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.exit.scalars import CANDIDATES, SCALARS
from ace_learn.exit.tracker import Hidden, Verdict
from ace_learn.signals import ACCEPTANCE

CaptureRows = Literal["boundaries", "all"]


class CapturedRows(NamedTuple):
    """Captured rows, one per kept input token of a think span, in decoding order."""

    request: Int[Tensor, " N"]
    """Index of the request in its batch."""
    output_index: Int[Tensor, " N"]
    """Index of the token in the request's output."""
    position: Int[Tensor, " N"]
    """0-based index of the token in its think span."""
    closed: Bool[Tensor, " N"]
    """Whether the token is a boundary."""
    confidence: Float[Tensor, " N"]
    scalars: Float[Tensor, "N C"]
    last: Float[Tensor, "N H"]
    aux: Float[Tensor, "N A"]
    candidates: Float[Tensor, "N D"]
    """D = 0 where they were not read."""
    draft: Float[Tensor, "N E"]
    """E = 0 where no drafter gives its states."""
    acceptance: Float[Tensor, "N P"]
    """P = 0 where it was not read."""

    def select(self, keep: Tensor) -> CapturedRows:
        """Rows of a mask or index."""
        return CapturedRows(*(column[keep] for column in self))


class Capture:
    """Collects rows on the host."""

    def __init__(
        self,
        rows: CaptureRows,
        *,
        hidden_size: int,
        num_aux: int,
        dtype: torch.dtype,
        candidates: bool = False,
        draft_size: int = 0,
        acceptance: bool = False,
    ) -> None:
        """Keeps boundary rows, or every row of the think span.

        Args:
            rows: Which rows.
            hidden_size: H of the target.
            num_aux: Tapped layers.
            dtype: Of the hidden states.
            candidates: Whether the tracker reads answer candidates.
            draft_size: Hidden size of a drafter that gives its states.
            acceptance: Whether the columns `ACCEPTANCE` are read.
        """
        self.rows = rows
        index, hidden = torch.empty(0, dtype=torch.long), torch.empty(0, hidden_size, dtype=dtype)
        empty = CapturedRows(
            request=index,
            output_index=index,
            position=index,
            closed=index.bool(),
            confidence=torch.empty(0),
            scalars=torch.empty(0, len(SCALARS)),
            last=hidden,
            aux=torch.empty(0, hidden_size * num_aux, dtype=dtype),
            candidates=torch.empty(0, len(CANDIDATES) if candidates else 0),
            draft=torch.empty(0, draft_size, dtype=dtype),
            acceptance=torch.empty(0, len(ACCEPTANCE) if acceptance else 0),
        )
        self._parts = [empty]

    def add(
        self,
        request: Int[Tensor, " B"],
        output_index: Int[Tensor, "B R"],
        valid: Bool[Tensor, "B R"],
        verdict: Verdict,
        hidden: Hidden,
    ) -> None:
        """Takes the rows of a step; `valid` marks rows whose input token was kept."""
        thinking = verdict.in_think & (verdict.thought > 0)
        keep = valid & (verdict.closed if self.rows == "boundaries" else thinking)
        columns = (
            request[:, None].expand_as(keep),
            output_index,
            verdict.thought - 1,
            verdict.closed,
            verdict.confidence,
            verdict.scalars,
            hidden.last,
            hidden.aux,
            verdict.candidates,
            hidden.aux[..., :0] if hidden.draft is None else hidden.draft,
            verdict.scalars[..., :0] if hidden.acceptance is None else hidden.acceptance,
        )
        self._parts.append(CapturedRows(*(column[keep].cpu() for column in columns)))

    def finish(self) -> CapturedRows:
        """All rows, ordered by request and position."""
        rows = CapturedRows(*(torch.cat(columns) for columns in zip(*self._parts, strict=True)))
        last = int(rows.output_index.max()) if len(rows.output_index) else 0
        return rows.select(torch.argsort(rows.request * (last + 1) + rows.output_index))

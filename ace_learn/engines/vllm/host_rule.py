"""The exit rule where the rows lie on the host, one of each request: plain Python and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from ace_learn.engines.vllm.events import ExitEvent
from ace_learn.engines.vllm.measure import Reads
from ace_learn.engines.vllm.reports import Findings, Followed
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.engines.vllm.ruling import BROKEN, Failure, Pick, Ruling, ThinkingRows
from ace_learn.exit.host import HostDecision, HostSpan, HostTables
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.rule import limits_of
from ace_learn.signals import SIGNALS
from ace_learn.thinking import BoundaryTables, ThinkMarkers

RowSignals: TypeAlias = Callable[
    [Float[ndarray, "n C"], Float[ndarray, "n H"], Float[ndarray, "n A"] | None], list[list[float]]
]
"""Running scalars, hidden states and tapped layers of rows to their signals, in the order of `SIGNALS`."""


_SMALLEST = -1e4
"""In place of minus infinity, whose product with probability 0 would be NaN."""


class _Word(NamedTuple):
    """What was said of a row."""

    forced: int = -1
    """Token that must follow."""
    exit: ExitEvent | None = None
    blocked: bool = False


_NOTHING = _Word()


@dataclass(kw_only=True, slots=True)
class _Request(Followed):
    """How far a request has come."""

    policy: ExitPolicy
    span: HostSpan
    next: int
    """Position of the row that is to come."""
    decision: HostDecision = field(default_factory=HostDecision)
    total: float = math.nan
    """Log-sum-exp of the latest row of logits, less their greatest."""
    word: _Word = _NOTHING
    """Of the last row."""

    @property
    def stands(self) -> tuple[bool, bool]:
        """Whether its next token is thought, and whether it may be forced."""
        inside = self.active and self.span.in_think
        return inside, inside and self.forces


class _Logits(NamedTuple):
    """The rows of a step, each less its greatest logit."""

    shifted: Float[ndarray, "R V"]
    weights: Float[ndarray, "R V"]
    sums: list[float]

    @classmethod
    def of(cls, logits: Float[Tensor, "R V"]) -> _Logits:
        """Looks at the logits, which samplers change later."""
        rows = logits.float().numpy()
        shifted = rows - np.maximum.reduce(rows, 1)[:, None]
        weights = np.exp(shifted)
        return cls(shifted, weights, np.add.reduce(weights, 1).tolist())

    def total(self, row: int) -> float:
        """Log-sum-exp of a row; NaN where it is not finite."""
        return math.log(self.sums[row]) if self.sums[row] > 0 else math.nan

    def entropy(self, row: int) -> float:
        """Entropy of a row, nats."""
        mean = float(np.dot(self.weights[row], self.shifted[row]))
        if math.isnan(mean):  # what weighs nothing adds nothing, be it minus infinity
            mean = float(np.dot(self.weights[row], np.maximum(self.shifted[row], _SMALLEST)))
        return self.total(row) - mean / self.sums[row]


class HostRule:
    """Follows every token at once, and asks the head where one ends a paragraph."""

    full = False

    def __init__(
        self,
        *,
        markers: ThinkMarkers,
        tables: BoundaryTables,
        family: ExitPolicy,
        signals: RowSignals,
        reads: Reads,
        num_requests: int,
    ) -> None:
        """Follows nobody yet.

        Args:
            markers: Think markers of the target.
            tables: Boundary tables of the target.
            family: The server's policy; it smooths over boundaries.
            signals: The head, and the derived signals.
            reads: What is to be measured.
            num_requests: Requests that there may be at once.
        """
        assert family.smooth_over == "boundaries", "elsewhere each token asks the head"
        self._tables, self._end, self._family = HostTables(markers, tables), markers.end, family
        self._signals, self._reads = signals, reads
        self._reads_logits = reads.entropy or reads.logprobs
        self._read = [index for index, name in enumerate(SIGNALS) if name in family.signals]
        self._requests: dict[str, _Request] = {}
        self._free = list(range(num_requests - 1, -1, -1))
        self._vocab_size = len(tables.breaks)
        self._above = np.empty((num_requests, self._vocab_size if self._reads_logits else 0), dtype=np.float32)
        """The latest row of each slot, less its greatest logit; what is never written takes no memory."""
        self._moved = True
        """Whether a request may stand elsewhere than in the latest step."""
        self._latest: tuple[list[str], list[tuple[bool, bool]], ThinkingRows | None] = [], [], None
        """Whose the rows of the latest step are, and where they stand."""

    @property
    def num_taken(self) -> int:
        """Requests that are followed."""
        return len(self._requests)

    def admit(
        self, request_id: str, prompt_length: int, policy: ExitPolicy, *, forces: bool, in_think: bool
    ) -> Followed:
        """Follows a request.

        Raises:
            ValueError: The policy is of another family than the server's.
        """
        limits_of(policy, self._family)
        if not self._free:
            size = len(self._above)
            self._above = np.concatenate((self._above, np.empty_like(self._above)))
            self._free = list(range(2 * size - 1, size - 1, -1))
        request = self._requests[request_id] = _Request(
            request_id,
            self._free.pop(),
            prompt_length,
            forces=forces,
            policy=policy,
            span=HostSpan(in_think),
            next=prompt_length - 1,
        )
        self._moved = True
        return request

    def drop(self, followed: Followed) -> None:
        """Forgets a request."""
        del self._requests[followed.request_id]
        self._free.append(followed.slot)
        self._moved = True

    def count_failure(self) -> None:
        """Whoever failed no longer stands where it stood; failures are seen at once, by every rank."""
        self._moved = True

    def warm_up(self, rows: RowTensors) -> None:
        """Nothing to do."""

    def apply(self, rows: StepRows, picks: Sequence[Pick]) -> Ruling:
        """Applies the rule to the picked requests of a step.

        Raises:
            ValueError: The rows do not fit together, or are not what the head reads.
        """
        size = len(rows.request_ids)
        if not size == len(rows.tokens) == len(rows.positions) == len(rows.hidden) == len(rows.logits):
            rows.check()
        if self._reads.aux and rows.aux is None:
            raise ValueError("the head reads target_aux, and the rows bring no aux")
        forced: dict[int, int] = {}
        found = Findings.none()
        with np.errstate(all="ignore"):  # what is not finite becomes NaN, and is told from there
            logits = _Logits.of(rows.logits) if self._reads_logits else None
            due = self._follow(rows, picks, logits, forced, found)
            failures = self._look(rows, due, logits, forced, found) if due else []
        for request in (request for failure in failures for request in failure.requests):
            request.active, self._moved = False, True
        return Ruling(
            forced=_column(forced, size) if forced else None,
            rows=self._thinking(rows.request_ids),
            read=(lambda: found) if any(found) else None,
            failures=failures,
        )

    def _follow(
        self, rows: StepRows, picks: Sequence[Pick], logits: _Logits | None, forced: dict[int, int], found: Findings
    ) -> list[tuple[int, _Request]]:
        """Advances requests by their tokens; those about which something may be said now, with their places."""
        tokens, positions = rows.tokens.tolist(), rows.positions.tolist()
        due: list[tuple[int, _Request]] = []
        slots: list[int] = []
        places: list[int] = []
        for place, request in picks:
            assert isinstance(request, _Request), "this rule admitted it"
            position = positions[place]
            if position != request.next:
                self._follow_again(place, request, position, forced, found)
                continue
            request.next, request.word = position + 1, _NOTHING
            if position >= request.prompt_length and not self._advance(request, tokens[place]):
                found.over.append((request, position))
                continue
            if not request.active:
                continue
            if request.span.closed or 0 < request.decision.forcing < len(self._end):
                due.append((place, request))
            if logits is not None:
                request.total = logits.total(place)
            slots.append(request.slot)
            places.append(place)
        if slots and logits is not None:
            self._above[slots] = logits.shifted if len(places) == len(logits.shifted) else logits.shifted[places]
        return due

    def _follow_again(
        self, place: int, request: _Request, position: int, forced: dict[int, int], found: Findings
    ) -> None:
        """A row that is run again, or one behind a gap, where no state is known."""
        if position == request.next - 1:  # what was said of it may have been dropped with its step
            _say(request, place, forced, found)
        elif position > request.next:
            request.active, self._moved = False, True

    def _advance(self, request: _Request, token: int) -> bool:
        """One token further, unless the thinking is over; whether it is not."""
        if request.span.over:
            return False
        if not 0 <= token < self._vocab_size:  # no state is known behind that
            request.active, self._moved = False, True
            return True
        span, inside = request.span, request.span.in_think
        logprob = math.nan
        if self._reads_logits:
            logprob = self._above.item(request.slot, token) - request.total
        span.advance(token, logprob, self._tables)
        self._moved |= span.in_think != inside
        return not span.over

    def _look(
        self,
        rows: StepRows,
        due: Sequence[tuple[int, _Request]],
        logits: _Logits | None,
        forced: dict[int, int],
        found: Findings,
    ) -> list[Failure]:
        """Says what must follow the last rows of requests."""
        closing = [(place, request) for place, request in due if request.span.closes]
        entropies = [math.nan if logits is None else logits.entropy(place) for place, _ in closing]
        scalars = [request.span.scalars(own) for (_, request), own in zip(closing, entropies, strict=True)]
        signals, failures = self._ask(rows, closing, scalars) if closing else ({}, [])
        for place, request in due:
            if place in signals or not request.span.closes:
                failures += self._decide(rows, place, request, signals.get(place, ()), forced, found)
        return failures

    def _ask(
        self, rows: StepRows, closing: Sequence[tuple[int, _Request]], scalars: Sequence[list[float]]
    ) -> tuple[dict[int, list[float]], list[Failure]]:
        """Signals of rows by their places, and the requests that the head fails for."""
        places = [place for place, _ in closing]
        try:
            return dict(zip(places, self._signals_of(rows, places, scalars), strict=True)), []
        except Exception as error:  # noqa: BLE001  # a head may fail for one request and not for another
            signals: dict[int, list[float]] = {}
            failures: list[Failure] = []
            for (place, request), own in zip(closing, scalars, strict=True):
                try:
                    (signals[place],) = self._signals_of(rows, [place], [own])
                except Exception as alone:  # noqa: BLE001  # whatever it is, it is this request's
                    failures.append(Failure.of([request], alone))
            if not failures:  # it is nobody's alone
                return {}, [Failure.of([request for _, request in closing], error)]
            return signals, failures

    def _signals_of(self, rows: StepRows, places: Sequence[int], scalars: Sequence[list[float]]) -> list[list[float]]:
        hidden, aux = rows.hidden.float().numpy(), None if rows.aux is None else rows.aux.float().numpy()
        return self._signals(
            np.array(scalars, dtype=np.float32), hidden[places, :], None if aux is None else aux[places, :]
        )

    def _decide(
        self,
        rows: StepRows,
        place: int,
        request: _Request,
        signals: Sequence[float],
        forced: dict[int, int],
        found: Findings,
    ) -> list[Failure]:
        """What must follow a request's last row."""
        decision, span = request.decision, request.span
        allowed = None if rows.allowed is None else rows.allowed[place].tolist()
        verdict = decision.advance(span, signals, request.policy, len(self._end), allowed=allowed)
        if span.closes and any(math.isnan(decision.smoothed[index]) for index in self._read):
            return [Failure([request], BROKEN)]
        if verdict.due or verdict.blocked:
            request.word = _Word(
                forced=self._end[decision.forcing - 1] if verdict.due and request.forces else -1,
                exit=_event(request) if verdict.due and decision.forcing == 1 else None,
                blocked=verdict.blocked,
            )
            _say(request, place, forced, found)
        return []

    def _thinking(self, request_ids: Sequence[str]) -> ThinkingRows | None:
        """Where the rows of a step stand; mostly as in the step before."""
        known, stood, rows = self._latest
        if not self._moved and request_ids == known:
            return rows
        requests = [self._requests.get(request_id) for request_id in request_ids]
        stands = [(False, False) if request is None else request.stands for request in requests]
        if stands != stood:
            thinking, open_ = torch.tensor(stands).unbind(-1)
            rows = ThinkingRows(thinking, open_ if any(may for _, may in stands) else None)
        self._moved, self._latest = False, (list(request_ids), stands, rows)
        return rows


def _column(values: dict[int, int], size: int) -> Tensor:
    return torch.tensor([values.get(place, -1) for place in range(size)])


def _say(request: _Request, place: int, forced: dict[int, int], found: Findings) -> None:
    """Passes on what was said of a request's last row."""
    word = request.word
    if word.forced >= 0:
        forced[place] = word.forced
    if word.exit is not None:
        found.exits.append(word.exit)
    if word.blocked:
        found.blocked.append((request.request_id, 0))


def _event(request: _Request) -> ExitEvent:
    """That the rule fired at a request's last row."""
    return ExitEvent(
        request_id=request.request_id,
        row=0,
        position=request.next - 1,
        tokens_thought=request.span.tokens,
        paragraphs=request.span.paragraphs,
        signals=tuple(request.decision.smoothed),
        forced=request.forces,
    )

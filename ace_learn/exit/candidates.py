"""Answer candidates that the thinking states: the contract's committer, run in shadow over every closed paragraph.

At a boundary a fresh committer reads the paragraph that it closes, as a text of its own that ended there; what it
commits is the current candidate, until a later paragraph states another one. Like the ring of the tracker, states are
kept by position, so that a row starts from the state before its own position, whatever was drafted there before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.contracts import JSON, Contract
from ace_learn.contracts.stream import Decode
from ace_learn.signals import CANDIDATES


class Candidate(NamedTuple):
    """What the paragraphs of a prefix have stated."""

    start: int
    """Position of the first token of the open paragraph."""
    answer: JSON = None
    """The candidate; None before the first."""
    repeats: int = 0
    """Paragraphs that stated it again."""
    age: int = 0
    """Paragraphs closed since the one that stated it first."""
    changes: int = 0
    """How often another answer took the place of the candidate before."""

    def closed(self, stated: JSON, contract: Contract, *, start: int) -> Candidate:
        """One paragraph further.

        Args:
            stated: What the paragraph stated; None for nothing.
            contract: Says which answers are equal.
            start: Where the next paragraph starts.
        """
        known = self.answer is not None
        if stated is None:
            return self._replace(start=start, age=self.age + known)
        if contract.equal(stated, self.answer):
            return self._replace(start=start, repeats=self.repeats + 1, age=self.age + 1)
        return Candidate(start=start, answer=stated, changes=self.changes + known)

    def columns(self) -> tuple[float, ...]:
        """The feature columns, in the order of `CANDIDATES`."""
        counts = (self.repeats, self.age, self.changes)
        return (float(self.answer is not None), *(math.log1p(count) for count in counts))


class _Slot:
    """One request: its tokens and the state after each, from the end of its prompt on."""

    def __init__(self, contract: Contract | None, prompt_length: int) -> None:
        self.contract = None if contract is None else contract.in_prose()
        self.base = prompt_length
        self.tokens: list[int] = []
        self.states = [Candidate(start=prompt_length)]
        """`states[i]` stands before `tokens[i]`."""


class CandidateReader:
    """Follows the candidates of an engine's slots, on the host; only boundaries cost more than a list entry.

    A paragraph is read once, and once more for each drafted boundary within it that was not accepted.
    """

    def __init__(self, decode: Decode, num_slots: int) -> None:
        """Follows nothing yet.

        Args:
            decode: Token ids to text.
            num_slots: Requests that can be followed at once.
        """
        self._decode = decode
        self._slots: list[_Slot | None] = [None] * num_slots

    def admit(self, slots: Sequence[int], prompt_lengths: Sequence[int], contracts: Sequence[Contract | None]) -> None:
        """Clears slots for new requests; one without a contract has no candidates."""
        for slot, length, contract in zip(slots, prompt_lengths, contracts, strict=True):
            self._slots[slot] = _Slot(contract, length)

    def observe(
        self,
        slots: Int[Tensor, " B"],
        positions: Int[Tensor, "B R"],
        tokens: Int[Tensor, "B R"],
        *,
        opens: Bool[Tensor, "B R"],
        closed: Bool[Tensor, "B R"],
    ) -> Float[Tensor, "B R D"]:
        """The columns `CANDIDATES` after each row.

        Args:
            slots: Whose rows.
            positions: Of the rows, ascending by one.
            tokens: Input tokens of the rows.
            opens: Whether the token opens a think span, where everything begins anew.
            closed: Whether the token closes a paragraph.
        """
        rows = torch.stack((tokens, opens.long(), closed.long()), dim=-1).tolist()
        found = [
            [state.columns() for state in self._follow(slot, first, row)]
            for slot, first, row in zip(slots.tolist(), positions[:, 0].tolist(), rows, strict=True)
        ]
        return torch.tensor(found, device=tokens.device).reshape(*tokens.shape, len(CANDIDATES))

    def _follow(self, number: int, first: int, rows: Sequence[Sequence[int]]) -> list[Candidate]:
        """The state after each row of one slot."""
        slot = self._slots[number]
        assert slot is not None, "rows of a slot that was not admitted"
        assert slot.base <= first <= slot.base + len(slot.tokens), "the state before the first row is not known"
        states = []
        for place, (token, opens, closes) in enumerate(rows, first - slot.base):
            if slot.tokens[place : place + 1] != [token]:  # new, or a draft that was rejected stood here
                del slot.tokens[place:], slot.states[place + 1 :]
                slot.tokens.append(token)
                slot.states.append(self._after(slot, opens=bool(opens), closes=bool(closes)))
            states.append(slot.states[place + 1])
        return states

    def _after(self, slot: _Slot, *, opens: bool, closes: bool) -> Candidate:
        """The state after the last token of a slot."""
        state, end = slot.states[-1], slot.base + len(slot.tokens)
        if opens:
            return Candidate(start=end)
        if not closes or slot.contract is None:
            return state
        text = self._decode(slot.tokens[state.start - slot.base :])
        commit = slot.contract.project(text)
        return state.closed(None if commit is None else commit.answer, slot.contract, start=end)

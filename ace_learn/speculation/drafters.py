"""Drafters: what proposes the next tokens of the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.observer import Observer

DrafterKind = Literal["none", "ngram", "draft_model", "eagle3", "mtp"]

_WITH_MODEL = ("draft_model", "eagle3", "mtp")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What drafts tokens for the target to verify."""

    kind: DrafterKind = "none"
    """`none` (no speculation), `ngram` (prompt lookup), `draft_model` (a smaller model with the same tokenizer), or a
    module trained on the target's hidden states: `eagle3` or `mtp`."""
    draft_tokens: int = 4
    """Draft length, K."""
    model: str | None = None
    """draft_model: folder or hub id of the draft model; eagle3, mtp: folder of the draft module;
    `ace_learn/reasoner-eagle3` is the EAGLE-3 module of the embedded reasoner."""

    def __post_init__(self) -> None:
        """Checks the values, and refuses what would be ignored."""
        if self.kind not in get_args(DrafterKind):
            raise ValueError(f"unknown drafter {self.kind!r}; known: {', '.join(get_args(DrafterKind))}")
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be >= 1, not {self.draft_tokens}; no speculation is kind: none")
        if self.kind in _WITH_MODEL and self.model is None:
            raise ValueError(
                f"the drafter {self.kind} needs `model`, a folder{' or hub id' * (self.kind == 'draft_model')}"
            )
        if self.kind not in _WITH_MODEL and self.model is not None:
            raise ValueError(f"the drafter {self.kind} reads no `model`; set kind: draft_model or leave it out")
        if self.kind == "none" and self.draft_tokens != 4:
            raise ValueError("draft_tokens would be ignored without a drafter; set kind: ngram or draft_model")


@dataclass(frozen=True, kw_only=True)
class DraftStates:
    """Hidden states of a drafter as features of the rows that the target verifies.

    The row at position p is given the drafter's state of position p - delay, whose tokens and hidden states of the
    target are all verified by then; so it is a function of the token prefix, whatever is drafted or accepted.
    """

    size: int
    """Hidden size of the drafter."""
    delay: int
    """Positions between a row and the state that it reads: K + 1, for drafts of up to K tokens."""
    drafter: str
    """SHA-256 of the drafter's weights."""

    def __post_init__(self) -> None:
        """Refuses a delay that would leave no token to draft."""
        if self.delay < 2:
            raise ValueError(
                f"the drafter's states are read K + 1 positions late, with K >= 1 draft tokens, not {self.delay - 1}; "
                "set draft_tokens >= 1"
            )
        if self.size < 1:
            raise ValueError(f"a drafter's hidden size is at least 1, not {self.size}")

    def to_json(self) -> dict[str, JSON]:
        """A JSON object that `from_json` reads."""
        return {"size": self.size, "delay": self.delay, "drafter": self.drafter}

    @classmethod
    def from_json(cls, fields: JsonFields) -> DraftStates:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: A field is missing or wrong.
        """
        return cls(size=fields.integer("size"), delay=fields.integer("delay"), drafter=fields.text("drafter"))


class Drafts(NamedTuple):
    """Proposals for a batch, row i for its i-th request."""

    tokens: Int[Tensor, "B K"]
    num_drafted: Int[Tensor, " B"]
    """Drafts of each request, 0..K; the columns behind them mean nothing."""
    probabilities: Float[Tensor, "B K V"] | None
    """The distribution p that each token was drawn from, over the target's vocabulary; None where drafting is
    deterministic (p is one-hot on the draft)."""
    states: Float[Tensor, "B R D"] | None = None
    """Column r: the drafter's hidden state for row r of the verify step (`DraftStates`), for as many rows as its delay
    allows. None where the drafter keeps none."""

    @classmethod
    def none(cls, batch: int, device: torch.device) -> Drafts:
        """Nothing is proposed."""
        count = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(count[:, None][:, :0], count, None)


@runtime_checkable
class DraftSession(Observer, Protocol):
    """A drafter's state for the requests of one batch; requests live in slots, the running ones in the first.

    It observes the hidden states of the drafter's `taps` for every row that the target runs, prompts included.
    """

    def draft(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Drafts:
        """Proposes what may follow; called before every step, with or without room.

        The proposal for a request depends on its own tokens and noise alone, never on what was accepted before.

        Args:
            sequences: Prompt and output so far of the requests in the first slots.
            room: Most tokens wanted for each; 0 for none.
        """
        ...

    def swap(self, a: int, b: int) -> None:
        """Exchanges two slots: a request has finished, and the running ones move together."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for batches of requests."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states its sessions observe (as in `Target.forward`)."""
        ...

    @property
    def states(self) -> DraftStates | None:
        """The hidden states that its sessions give with every step; None: none."""
        ...

    def start(self, keys: Int[Tensor, " B"]) -> DraftSession:
        """A session for a new batch.

        Args:
            keys: Key of the request in each slot; it names the request's noise.
        """
        ...


class NgramDrafter:
    """Prompt lookup: continues the latest earlier occurrence of the longest matching suffix.

    The search is over the prompt and the output so far, longest n-gram first (Saxena 2023, "prompt lookup decoding").
    It keeps no state between steps, so that it is its own session.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, max_context: int = 4096) -> None:
        """Sets the sizes.

        Args:
            max_ngram: Longest suffix looked up.
            min_ngram: Shortest suffix looked up.
            max_context: Only the newest tokens are searched, so that a step's cost does not grow with the trace.

        Raises:
            ValueError: The sizes are not 1 <= min_ngram <= max_ngram < max_context.
        """
        if not 1 <= min_ngram <= max_ngram < max_context:
            raise ValueError(
                f"need 1 <= min_ngram <= max_ngram < max_context, not {min_ngram}, {max_ngram}, {max_context}"
            )
        self.max_ngram, self.min_ngram, self.max_context = max_ngram, min_ngram, max_context
        self.taps: tuple[int, ...] = ()
        self.states: DraftStates | None = None
        self._device = torch.device("cpu")

    def observe(
        self,
        positions: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q A"],
        *,
        longest: int,
        first_slot: int = 0,
    ) -> None:
        """Nothing is read of the target."""

    def start(self, keys: Int[Tensor, " B"]) -> NgramDrafter:
        """Itself: there is nothing to keep, and no noise to name."""
        self._device = keys.device
        return self

    def draft(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Drafts:
        """Looks every request's suffix up; see `DraftSession`."""
        found = [self.propose(ids, n) if n else [] for ids, n in zip(sequences, room, strict=True)]
        width = max(map(len, found))
        padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in found], dtype=torch.long)
        counts = torch.tensor([len(tokens) for tokens in found])
        return Drafts(padded.to(self._device), counts.to(self._device), None)

    def swap(self, a: int, b: int) -> None:
        """Nothing is kept by slot."""

    def propose(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Continuation of the latest match of the longest suffix; empty without a match."""
        context = np.asarray(ids[-self.max_context :])
        if len(context) < 2:
            return []
        matches = np.flatnonzero(context[:-1] == context[-1])  # where a suffix of width 1 ends again
        found = matches if self.min_ngram == 1 else matches[:0]
        for width in range(2, min(self.max_ngram, len(context) - 1) + 1):
            matches = matches[matches >= width - 1]
            matches = matches[context[matches - width + 1] == context[-width]]
            if not len(matches):
                break
            if width >= self.min_ngram:
                found = matches
        if not len(found):
            return []
        start = int(found[-1]) + 1
        continuation: list[int] = context[start : start + num_tokens].tolist()
        return continuation

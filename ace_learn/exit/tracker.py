"""Keeps the exit rule's state by sequence position, for engines that verify several tokens per step.

The state after position p lives in a ring per slot, and a step's first row starts from the state after its own position
minus one, *found by position*. No accepted counts are needed, and rejected drafts need no special case: what they wrote
is overwritten before it can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.contracts import Contract
from ace_learn.exit.candidates import CandidateReader
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.state import DECISION_SIZE, SPAN_SIZE, Decision, Span, SpanMachine, decide
from ace_learn.signals import LEARNED, with_derived
from ace_learn.thinking import BoundaryTables, ThinkMarkers


class Hidden(NamedTuple):
    """Hidden states of the rows of a step."""

    last: Float[Tensor, "B R H"]
    """What the target's output layer reads."""
    aux: Float[Tensor, "B R A"]
    """The tapped layers, concatenated; A = 0 where none is tapped."""
    draft: Float[Tensor, "B R D"] | None = None
    """The drafter's hidden state K + 1 positions before each row; None where no drafter keeps one."""
    acceptance: Float[Tensor, "B R C"] | None = None
    """Columns `ACCEPTANCE` of each row; None where nothing reads them."""


@runtime_checkable
class Signaller(Protocol):
    """Turns the rows of a step into learned signals: a head together with the features that it reads."""

    def __call__(
        self, scalars: Float[Tensor, "B R C"], candidates: Float[Tensor, "B R D"], hidden: Hidden
    ) -> Float[Tensor, "B R L"]:
        """Signals of every row, columns `LEARNED`."""
        ...


def check_head(policy: ExitPolicy, signaller: Signaller | None) -> None:
    """Refuses a policy without what it reads.

    Raises:
        ValueError: The policy reads learned signals, and there is no head.
    """
    learned = [name for name in policy.signals if name in LEARNED]
    if signaller is None and learned:
        raise ValueError(
            f"the exit policy {policy.predicate!r} reads signals ({', '.join(learned)}): name a head folder to "
            "compute them"
        )


class Rows(NamedTuple):
    """The rows of a verify step: input tokens, and what the target says after them."""

    tokens: Int[Tensor, "B R"]
    positions: Int[Tensor, "B R"]
    logprobs: Float[Tensor, "B R"]
    """Raw log-probability of each input token given its prefix, nats."""
    entropy: Float[Tensor, "B R"]
    """Entropy of the next-token distribution, nats."""
    hidden: Hidden


class Verdict(NamedTuple):
    """What the rule says of the rows of a step."""

    forced: Int[Tensor, "B R"]
    """Token that must follow the row, or -1."""
    closed: Bool[Tensor, "B R"]
    """Whether the row's token is a boundary."""
    in_think: Bool[Tensor, "B R"]
    """Whether the row's token stands in a think span, or opens it."""
    thought: Int[Tensor, "B R"]
    """Tokens thought up to and including the row."""
    paragraphs: Int[Tensor, "B R"]
    """Boundaries passed up to and including the row."""
    scalars: Float[Tensor, "B R C"]
    candidates: Float[Tensor, "B R D"]
    """D = 0 where nothing reads them."""
    confidence: Float[Tensor, "B R"]
    """Geometric mean probability of the paragraph so far."""
    smoothed: Float[Tensor, "B R S"]


class ExitTracker:
    """The exit rule over the slots of an engine."""

    def __init__(
        self,
        *,
        markers: ThinkMarkers,
        tables: BoundaryTables,
        policy: ExitPolicy,
        signaller: Signaller | None,
        num_slots: int,
        window: int,
        device: torch.device,
        candidates: CandidateReader | None = None,
    ) -> None:
        """Allocates the ring.

        Args:
            markers: Think markers of the target.
            tables: Boundary tables of the target.
            policy: When to exit; `ExitPolicy.never()` only tracks.
            signaller: Learned signals of the rows; None only with a policy that reads none.
            num_slots: Requests that can be tracked at once.
            window: Ring length; at least the rows of all steps in flight, plus one step.
            device: Where the state lives.
            candidates: Reads the answers that the thinking states; None: nothing needs them.

        Raises:
            ValueError: The policy reads learned signals and there is no head.
        """
        check_head(policy, signaller)
        self.policy = policy
        self.signaller = signaller
        self.candidates = candidates
        self.machine = SpanMachine(markers, tables, device)
        self.end = torch.tensor(markers.end, device=device)
        self.window = window
        self.ring = torch.zeros(num_slots, window, SPAN_SIZE + DECISION_SIZE, device=device)
        self.held_position = torch.full((num_slots, window), -1, dtype=torch.long, device=device)

    def admit(
        self,
        slots: Int[Tensor, " B"],
        prompt_length: Int[Tensor, " B"],
        *,
        in_think: Bool[Tensor, " B"],
        armed: Bool[Tensor, " B"],
        contracts: Sequence[Contract | None] = (),
    ) -> None:
        """Clears slots for new requests.

        Args:
            slots: Which slots.
            prompt_length: Tokens of each prompt.
            in_think: Whether the prompt leaves a think block open.
            armed: Whether the rule may fire at all.
            contracts: What each request is to answer; read with `candidates` alone.
        """
        if self.candidates is not None:
            self.candidates.admit(slots.tolist(), prompt_length.tolist(), contracts)
        initial = in_think.float()
        decision = Decision.initial(initial)._replace(forcing=torch.where(armed, 0.0, float(len(self.end))))
        self.held_position[slots] = -1
        packed = torch.cat((Span.initial(initial).pack(), decision.pack()), -1)
        self._store(slots, prompt_length[:, None] - 1, packed[:, None])

    def observe(self, slots: Int[Tensor, " B"], rows: Rows) -> Verdict:
        """Follows the rows of one step and says which next tokens are forced.

        Raises:
            AssertionError: The state before a request's first row is not in the ring.
        """
        before = self._load(slots, rows.positions[:, 0] - 1)
        span = self.machine.advance(Span.unpack(before[:, :SPAN_SIZE]), rows.tokens, rows.logprobs)
        scalars = span.scalars(rows.entropy)
        candidates = self._read_candidates(slots, rows, span)
        signals = self._signals(scalars, candidates, rows.hidden)
        packed, forced = before[:, None, SPAN_SIZE:].expand(-1, rows.tokens.shape[1], -1), rows.tokens.new_tensor(-1)
        if signals is not None:
            verdicts = decide(Decision.unpack(before[:, SPAN_SIZE:]), span, signals, self.policy, len(self.end))
            packed = verdicts.decision.pack()
            token = self.end[(verdicts.decision.forcing.long() - 1).clamp_min(0)]
            forced = torch.where(verdicts.due, token, forced)
        self._store(slots, rows.positions, torch.cat((span.pack(), packed), -1))
        return Verdict(
            forced=forced.expand_as(rows.tokens),
            closed=span.closed > 0,
            in_think=span.in_think > 0,
            thought=span.tokens.long(),
            paragraphs=span.paragraphs.long(),
            scalars=scalars,
            candidates=candidates,
            confidence=span.paragraph_confidence(),
            smoothed=Decision.unpack(packed).smoothed,
        )

    def _read_candidates(self, slots: Int[Tensor, " B"], rows: Rows, span: Span) -> Float[Tensor, "B R D"]:
        """The answers stated in the thinking up to each row; no columns where nothing reads them."""
        if self.candidates is None:
            return rows.logprobs.new_zeros(*rows.tokens.shape, 0)
        opens, closed = (span.in_think > 0) & (span.tokens == 0), span.closed > 0
        return self.candidates.observe(slots, rows.positions, rows.tokens, opens=opens, closed=closed)

    def _signals(
        self, scalars: Float[Tensor, "B R C"], candidates: Float[Tensor, "B R D"], hidden: Hidden
    ) -> Float[Tensor, "B R S"] | None:
        """Every signal of every row, NaN where it cannot be computed; None where nothing reads any."""
        if self.signaller is None and self.policy.predicate == "never":
            return None
        learned = scalars.new_full((*scalars.shape[:2], len(LEARNED)), torch.nan)
        if self.signaller is not None:
            learned = self.signaller(scalars, candidates, hidden)
        columns = {"scalars": scalars}
        if self.candidates is not None:
            columns["candidates"] = candidates
        if hidden.acceptance is not None:
            columns["acceptance"] = hidden.acceptance
        return with_derived(learned, columns)

    def _load(self, slots: Int[Tensor, " B"], positions: Int[Tensor, " B"]) -> Float[Tensor, "B D"]:
        place = positions % self.window
        torch._assert_async((self.held_position[slots, place] == positions).all())  # an assert without a host sync
        return self.ring[slots, place]

    def _store(self, slots: Int[Tensor, " B"], positions: Int[Tensor, "B R"], packed: Float[Tensor, "B R D"]) -> None:
        assert positions.shape[1] <= self.window, "a step with more rows than the ring is long"
        slots, place = slots[:, None], positions % self.window
        self.ring[slots, place] = packed
        self.held_position[slots, place] = positions

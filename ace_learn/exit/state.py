"""The per-token state machine of the exit rule (a function of the token prefix alone).

The state after a position is one row of D floats (counters stay exact below 2**24), so that a ring of states is one
tensor and a gather or scatter is one operation. `SpanMachine` follows the think span and its running scalars;
`decide` follows the smoothed signals. Both read the R rows of a step one after another, are elementwise over the batch,
and never synchronise with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.exit.policy import ewma_step
from ace_learn.exit.rule import ExitRule
from ace_learn.signals import SIGNALS
from ace_learn.thinking import IN_BREAK, BoundaryTables, MarkerMatcher, ThinkMarkers


class Span(NamedTuple):
    """Think span and running scalars after one token [B], or after each row [B, R]; every field is a float tensor."""

    in_think: Tensor
    """1 inside a think span."""
    tokens: Tensor
    """Tokens thought so far, this one included."""
    paragraphs: Tensor
    """Boundaries passed, this one included."""
    standing: Tensor
    """Where the text stands (`ace_learn.thinking`)."""
    closed: Tensor
    """1 where this token is a boundary."""
    start_matched: Tensor
    end_matched: Tensor
    sum_logprob: Tensor
    min_logprob: Tensor
    paragraph_tokens: Tensor
    paragraph_sum_logprob: Tensor
    paragraph_min_logprob: Tensor

    def pack(self) -> Float[Tensor, "*rows D"]:
        """The fields as columns."""
        return torch.stack(tuple(self), dim=-1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "*rows D"]) -> Span:
        """Reads what `pack` wrote."""
        return cls(*packed.unbind(-1))

    @classmethod
    def initial(cls, in_think: Float[Tensor, " B"]) -> Span:
        """Before the first generated token; `in_think` where the prompt ends inside an open think block."""
        zero = torch.zeros_like(in_think)
        return cls(*[in_think if name == "in_think" else zero for name in cls._fields])._replace(
            standing=torch.full_like(in_think, IN_BREAK)
        )

    def scalars(self, entropy: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows C"]:
        """The running scalars, in the order of `SCALARS`; zeros before the first think token."""
        return torch.stack(
            (
                self.tokens.log1p(),
                self.paragraphs.log1p(),
                self.sum_logprob / self.tokens.clamp_min(1),
                self.min_logprob,
                self.paragraph_sum_logprob / self.paragraph_tokens.clamp_min(1),
                self.paragraph_min_logprob,
                entropy,
            ),
            dim=-1,
        )

    def paragraph_confidence(self) -> Float[Tensor, "*rows"]:
        """Geometric mean of the probabilities of the paragraph's tokens so far (DESIGN: target `confidence`)."""
        return (self.paragraph_sum_logprob / self.paragraph_tokens.clamp_min(1)).exp()


def entropy_of(logprobs: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """Entropy in nats of distributions given by their log-probabilities."""
    return -(logprobs.exp() * logprobs.clamp_min(-1e4)).sum(-1)


SPAN_SIZE = len(Span._fields)


class SpanMachine:
    """Advances `Span` by one token."""

    def __init__(self, markers: ThinkMarkers, tables: BoundaryTables, device: torch.device) -> None:
        """Puts the vocabulary tables on the device."""
        self.tables = tables.to(device)
        vocab_size = len(tables.breaks)
        self.start = MarkerMatcher(markers.start, vocab_size, device)
        self.end = MarkerMatcher(markers.end, vocab_size, device)

    def advance(
        self,
        span: Span,
        tokens: Int[Tensor, "B R"],
        logprobs: Float[Tensor, "B R"],
        *,
        follows: Bool[Tensor, " B"] | None = None,
    ) -> Span:
        """The span after each row.

        Args:
            span: Before the first row.
            tokens: Of the rows.
            logprobs: Raw log-probability of each token given its prefix, nats.
            follows: Where the first row follows on the span; elsewhere the span has seen its token. None: everywhere.
        """
        facts = [field.unbind(1) for field in self.tables.of(tokens)]
        starts, ends = self.start.symbol[tokens].unbind(1), self.end.symbol[tokens].unbind(1)
        after: list[Span] = []
        for r, logprob in enumerate(logprobs.unbind(1)):
            token = BoundaryTables(*(field[r] for field in facts))
            moved = self._step(span, token, starts[r], ends[r], logprob)
            if r == 0 and follows is not None:
                moved = Span.unpack(torch.where(follows[:, None], moved.pack(), span.pack()))
            after.append(moved)
            span = moved
        fields = torch.stack([field for row in after for field in row], dim=-1)
        return Span.unpack(fields.unflatten(-1, (len(after), SPAN_SIZE)))

    def _step(
        self, span: Span, token: BoundaryTables, start: Int[Tensor, " B"], end: Int[Tensor, " B"], logprob: Tensor
    ) -> Span:
        """The span after one token, of which the tables say `token`, and the markers `start` and `end`."""
        inside = span.in_think > 0
        start_matched = self.start.step(torch.where(inside, 0.0, span.start_matched), start)
        end_matched = self.end.step(torch.where(inside, span.end_matched, 0.0), end)
        entered = ~inside & (start_matched == self.start.length)
        stays = ~(inside & (end_matched == self.end.length))
        thought = inside & stays
        standing, closes = token.step(span.standing)
        closed = thought & closes
        same_paragraph, keep = span.closed == 0, ~entered
        logprob_thought = thought * logprob
        paragraph_min = torch.minimum(span.paragraph_min_logprob * same_paragraph, logprob)
        return Span(
            in_think=((inside | entered) & stays).float(),
            tokens=(span.tokens + thought) * keep,
            paragraphs=(span.paragraphs + closed) * keep,
            standing=torch.where(entered, IN_BREAK, torch.where(thought, standing, span.standing)),
            closed=closed.float(),
            start_matched=start_matched * keep,
            end_matched=end_matched * stays,
            sum_logprob=(span.sum_logprob + logprob_thought) * keep,
            min_logprob=torch.where(thought, torch.minimum(span.min_logprob, logprob), span.min_logprob) * keep,
            paragraph_tokens=(span.paragraph_tokens * same_paragraph + thought) * keep,
            paragraph_sum_logprob=(span.paragraph_sum_logprob * same_paragraph + logprob_thought) * keep,
            paragraph_min_logprob=torch.where(thought, paragraph_min, span.paragraph_min_logprob) * keep,
        )


class Decision(NamedTuple):
    """Smoothed signals and the verdict after one token (*rows is B), or after each row (B R)."""

    smoothed: Float[Tensor, "*rows S"]
    seen: Float[Tensor, "*rows"]
    """1 once the moving average holds a value."""
    held: Float[Tensor, "*rows"]
    """Consecutive boundaries, up to here, at which the predicate held."""
    forcing: Float[Tensor, "*rows"]
    """Tokens of the think end that have been forced, the one after this token included; 0 while the rule may fire."""

    def pack(self) -> Float[Tensor, "*rows D"]:
        """The fields as columns."""
        return torch.cat((self.smoothed, torch.stack((self.seen, self.held, self.forcing), dim=-1)), dim=-1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "*rows D"]) -> Decision:
        """Reads what `pack` wrote."""
        width = len(SIGNALS)
        return cls(packed[..., :width], *packed[..., width:].unbind(-1))

    @classmethod
    def initial(cls, like: Float[Tensor, " B"]) -> Decision:
        """Before the first token."""
        zero = torch.zeros_like(like)
        return cls(zero[:, None].repeat(1, len(SIGNALS)), zero, zero, zero)


DECISION_SIZE = len(SIGNALS) + 3


class Verdicts(NamedTuple):
    """What the rule says of the rows of a step."""

    decision: Decision
    """After each row."""
    due: Bool[Tensor, "B R"]
    """Where a token of the think end must come next, but for `blocked`."""
    blocked: Bool[Tensor, "B R"] | None
    """Where the grammar forbids it; None where there is no grammar."""


def decide(
    decision: Decision,
    span: Span,
    signals: Float[Tensor, "B R S"],
    rule: ExitRule,
    end_length: int,
    *,
    allowed: Bool[Tensor, "B R E"] | None = None,
) -> Verdicts:
    """The decision after each row, and where the next token is forced.

    Fires at a boundary of a think span that is long enough, when the predicate has held for `patience` consecutive
    boundaries. Behind a firing the following tokens of a longer think end are forced one by one. Labels and
    certificates know the first think span alone, so a span that opens behind it is left alone.

    Args:
        decision: Before the first row.
        span: After each row.
        signals: Of each row.
        rule: When to exit.
        end_length: Tokens of the think end, E.
        allowed: Whether a grammar allows each of them behind each row; where it does not, the rule may fire again at
            the next boundary. None: no grammar.
    """
    thought = (span.in_think > 0) & (span.tokens > 0)  # the think start itself is not thought
    over = (span.in_think == 0) & (span.tokens > 0)
    closes = thought & (span.closed > 0)
    update = closes if rule.smooth_over == "boundaries" else thought
    smoothed, seen = _smooth(decision, signals, update, rule.ewma)
    held = _count_boundaries(decision.held, closes, rule.holds(smoothed))
    ready = closes & (held >= rule.patience) & (span.tokens >= rule.min_thinking_tokens)
    forcing, due, blocked = _force(decision.forcing, ready, over, end_length, allowed)
    return Verdicts(Decision(smoothed, seen, held, forcing), due, blocked)


def _smooth(
    decision: Decision, signals: Float[Tensor, "B R S"], update: Bool[Tensor, "B R"], ewma: float
) -> tuple[Float[Tensor, "B R S"], Float[Tensor, "B R"]]:
    """The moving average after each row, and whether it holds a value."""
    average, seen = decision.smoothed, decision.seen[:, None] > 0
    averages, known = [], []
    for value, moves in zip(signals.unbind(1), update.unsqueeze(-1).unbind(1), strict=True):
        moved = torch.where(seen, ewma_step(average, value, ewma), value)
        average, seen = torch.where(moves, moved, average), seen | moves
        averages.append(average)
        known.append(seen)
    return torch.stack(averages, dim=1), torch.cat(known, dim=1).float()


def _count_boundaries(
    held: Float[Tensor, " B"], closes: Bool[Tensor, "B R"], holds: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """Consecutive boundaries at which the predicate holds, after each row."""
    counts = []
    for boundary, good in zip(closes.unbind(1), holds.unbind(1), strict=True):
        held = torch.where(boundary, (held + 1) * good, held)
        counts.append(held)
    return torch.stack(counts, dim=1)


def _force(
    forcing: Float[Tensor, " B"],
    ready: Bool[Tensor, "B R"],
    over: Bool[Tensor, "B R"],
    end_length: int,
    allowed: Bool[Tensor, "B R E"] | None,
) -> tuple[Float[Tensor, "B R"], Bool[Tensor, "B R"], Bool[Tensor, "B R"] | None]:
    """Tokens forced after each row, where one is due, and where the grammar forbids it."""
    states, dues, blocks = [], [], []
    for r, (fires, behind) in enumerate(zip(ready.unbind(1), over.unbind(1), strict=True)):
        due = fires & (forcing == 0)
        if end_length > 1:
            due = due | ((forcing > 0) & (forcing < end_length))
        forcing = torch.where(behind, end_length, forcing + due)
        if allowed is not None:
            token = (forcing.long() - 1).clamp_min(0)
            blocked = due & ~allowed[:, r].gather(1, token[:, None])[:, 0]
            forcing = torch.where(blocked, 0.0, forcing)
            blocks.append(blocked)
        states.append(forcing)
        dues.append(due)
    return torch.stack(states, dim=1), torch.stack(dues, dim=1), torch.stack(blocks, dim=1) if blocks else None

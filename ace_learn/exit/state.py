"""The per-token state machine of the exit rule (a function of the token prefix alone).

The state after a position is one row of D floats (counters stay exact below 2**24), so that a ring of states is one
tensor and a gather or scatter is one operation. `SpanMachine` follows the think span and its running scalars;
`decide` follows the smoothed signals. Both are elementwise over the batch and never synchronise with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.exit.policy import ExitPolicy, ewma_step
from ace_learn.signals import SIGNALS
from ace_learn.thinking import IN_BREAK, BoundaryTables, MarkerMatcher, ThinkMarkers


class Span(NamedTuple):
    """Think span and running scalars after one token; each field is a float tensor [B]."""

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

    def pack(self) -> Float[Tensor, "B D"]:
        """The fields as columns."""
        return torch.stack(tuple(self), dim=-1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "B D"]) -> Span:
        """Reads what `pack` wrote."""
        return cls(*packed.unbind(-1))

    @classmethod
    def initial(cls, in_think: Float[Tensor, " B"]) -> Span:
        """Before the first generated token; `in_think` where the prompt ends inside an open think block."""
        zero = torch.zeros_like(in_think)
        return cls(*[in_think if name == "in_think" else zero for name in cls._fields])._replace(
            standing=torch.full_like(in_think, IN_BREAK)
        )

    def scalars(self, entropy: Float[Tensor, " B"]) -> Float[Tensor, "B C"]:
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

    def paragraph_confidence(self) -> Float[Tensor, " B"]:
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

    def advance(self, span: Span, token: Int[Tensor, " B"], logprob: Float[Tensor, " B"]) -> Span:
        """The span after `token`, whose raw log-probability given its prefix is `logprob` (nats)."""
        inside = span.in_think > 0
        start_matched = self.start.advance(torch.where(inside, 0.0, span.start_matched), token)
        end_matched = self.end.advance(torch.where(inside, span.end_matched, 0.0), token)
        entered = ~inside & (start_matched == self.start.length)
        left = inside & (end_matched == self.end.length)
        thought = inside & ~left
        standing, closes = self.tables.advance(span.standing, token)
        closed = thought & closes
        first = span.closed > 0
        keep = ~entered
        return Span(
            in_think=((inside | entered) & ~left).float(),
            tokens=(span.tokens + thought) * keep,
            paragraphs=(span.paragraphs + closed) * keep,
            standing=torch.where(entered, IN_BREAK, torch.where(thought, standing, span.standing)),
            closed=closed.float(),
            start_matched=start_matched * keep,
            end_matched=end_matched * ~left,
            sum_logprob=(span.sum_logprob + thought * logprob) * keep,
            min_logprob=torch.where(thought, torch.minimum(span.min_logprob, logprob), span.min_logprob) * keep,
            paragraph_tokens=(span.paragraph_tokens * ~first + thought) * keep,
            paragraph_sum_logprob=(span.paragraph_sum_logprob * ~first + thought * logprob) * keep,
            paragraph_min_logprob=torch.where(
                thought, torch.minimum(span.paragraph_min_logprob * ~first, logprob), span.paragraph_min_logprob
            )
            * keep,
        )


class Decision(NamedTuple):
    """Smoothed signals and the verdict after one token."""

    smoothed: Float[Tensor, "B S"]
    seen: Float[Tensor, " B"]
    """1 once the moving average holds a value."""
    held: Float[Tensor, " B"]
    """Consecutive boundaries, up to here, at which the predicate held."""
    forcing: Float[Tensor, " B"]
    """Tokens of the think end that have been forced, the one after this token included; 0 while the rule may fire."""

    def pack(self) -> Float[Tensor, "B D"]:
        """The fields as columns."""
        return torch.cat((self.smoothed, torch.stack((self.seen, self.held, self.forcing), dim=-1)), dim=-1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "B D"]) -> Decision:
        """Reads what `pack` wrote."""
        width = len(SIGNALS)
        return cls(packed[:, :width], *packed[:, width:].unbind(-1))

    @classmethod
    def initial(cls, like: Float[Tensor, " B"]) -> Decision:
        """Before the first token."""
        zero = torch.zeros_like(like)
        return cls(zero[:, None].repeat(1, len(SIGNALS)), zero, zero, zero)


DECISION_SIZE = len(SIGNALS) + 3


def decide(
    decision: Decision, span: Span, signals: Float[Tensor, "B S"], policy: ExitPolicy, end_length: int
) -> tuple[Decision, Bool[Tensor, " B"]]:
    """One token further: the new decision state, and where the next token is forced.

    Fires at a boundary of a think span that is long enough, when the predicate has held for `patience` consecutive
    boundaries. Behind a firing the following tokens of a longer think end are forced one by one. Labels and
    certificates know the first think span alone, so a span that opens behind it is left alone.
    """
    thought = (span.in_think > 0) & (span.tokens > 0)  # the think start itself is not thought
    over = (span.in_think == 0) & (span.tokens > 0)
    closes = thought & (span.closed > 0)
    update = closes if policy.smooth_over == "boundaries" else thought
    seen = decision.seen > 0
    average = torch.where(seen[:, None], ewma_step(decision.smoothed, signals, policy.ewma), signals)
    smoothed = torch.where(update[:, None], average, decision.smoothed)
    held = torch.where(closes, (decision.held + 1) * policy.holds(smoothed), decision.held)
    fires = closes & (decision.forcing == 0) & (held >= policy.patience) & (span.tokens >= policy.min_thinking_tokens)
    continues = (decision.forcing > 0) & (decision.forcing < end_length)
    forcing = torch.where(over, end_length, decision.forcing + (fires | continues))
    return Decision(smoothed, (seen | update).float(), held, forcing), fires | continues

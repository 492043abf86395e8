"""The exit rule for one request, one token after another, in plain Python.

The same rule as `ace_learn.exit.state`, for rows that lie on the host: there a single call of torch costs more than all
of this. A test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ace_learn.exit.policy import ExitPolicy, ewma_step
from ace_learn.signals import BY_NAME, SIGNALS
from ace_learn.thinking import AFTER_NEWLINE, IN_BREAK, TEXT, BoundaryTables, MarkerMatcher, ThinkMarkers


class HostTables:
    """What each token does to a paragraph and to the markers, as lists over the vocabulary."""

    def __init__(self, markers: ThinkMarkers, tables: BoundaryTables) -> None:
        """Reads the tables."""
        self.breaks, self.ends_newline, self.blank, self.newline = (table.tolist() for table in tables)
        self.start, self.end = (_HostMatcher(marker, len(self.breaks)) for marker in markers)
        plain = ~(tables.breaks | tables.ends_newline | tables.blank | tables.newline)
        plain[[*markers.start, *markers.end]] = False
        self.plain: list[bool] = plain.tolist()
        """Tokens that do nothing to a paragraph or a marker."""

    def standing(self, before: float, token: int) -> tuple[float, bool]:
        """`BoundaryTables.step` for one token."""
        after_one, blank = before == AFTER_NEWLINE, self.blank[token]
        if before == IN_BREAK and blank:
            return IN_BREAK, False
        if self.breaks[token] or (after_one and self.newline[token]):
            return IN_BREAK, True
        return (AFTER_NEWLINE if self.ends_newline[token] or (after_one and blank) else TEXT), False


class _HostMatcher:
    """`MarkerMatcher` for one stream."""

    def __init__(self, marker: tuple[int, ...], vocab_size: int) -> None:
        matcher = MarkerMatcher(marker, vocab_size, torch.device("cpu"))
        self.length = matcher.length
        self.symbol: list[int] = matcher.symbol.tolist()
        self.transition: list[list[int]] = matcher.transition.long().tolist()

    def step(self, matched: int, token: int) -> int:
        return self.transition[matched][self.symbol[token]]


@dataclass(slots=True)
class HostSpan:
    """Think span and running scalars after a token; the fields are those of `Span`."""

    in_think: bool
    tokens: int = 0
    paragraphs: int = 0
    standing: float = IN_BREAK
    closed: bool = False
    start_matched: int = 0
    end_matched: int = 0
    sum_logprob: float = 0.0
    min_logprob: float = 0.0
    paragraph_tokens: int = 0
    paragraph_sum_logprob: float = 0.0
    paragraph_min_logprob: float = 0.0

    @property
    def closes(self) -> bool:
        """Whether the token is a boundary of the thinking."""
        return self.closed and self.in_think and self.tokens > 0

    @property
    def over(self) -> bool:
        """Whether the thinking is closed."""
        return not self.in_think and self.tokens > 0

    def advance(self, token: int, logprob: float, tables: HostTables) -> None:
        """One token further.

        Args:
            token: Which.
            logprob: Its raw log-probability given its prefix, nats.
            tables: Of the target.
        """
        was_closed, self.closed = self.closed, False
        if was_closed:
            self.paragraph_tokens, self.paragraph_sum_logprob = 0, 0.0
        if not self.in_think:
            self._advance_outside(token, tables)
            return
        if tables.plain[token]:
            self.start_matched = self.end_matched = 0
            self.standing = TEXT
        else:
            self.start_matched = tables.start.step(0, token)
            self.end_matched = tables.end.step(self.end_matched, token)
            if self.end_matched == tables.end.length:
                self.in_think, self.end_matched = False, 0
                return
            self.standing, self.closed = tables.standing(self.standing, token)
            self.paragraphs += self.closed
        self.tokens += 1
        self.sum_logprob += logprob
        self.min_logprob = _least(self.min_logprob, logprob)
        self.paragraph_tokens += 1
        self.paragraph_sum_logprob += logprob
        self.paragraph_min_logprob = _least(0.0 if was_closed else self.paragraph_min_logprob, logprob)

    def _advance_outside(self, token: int, tables: HostTables) -> None:
        self.start_matched = tables.start.step(self.start_matched, token)
        self.end_matched = tables.end.step(0, token)
        if self.start_matched == tables.start.length:
            self.in_think, self.standing, self.start_matched = True, IN_BREAK, 0
            self.tokens = self.paragraphs = self.paragraph_tokens = 0
            self.sum_logprob = self.min_logprob = self.paragraph_sum_logprob = self.paragraph_min_logprob = 0.0

    def scalars(self, entropy: float) -> list[float]:
        """The running scalars, in the order of `SCALARS`."""
        return [
            math.log1p(self.tokens),
            math.log1p(self.paragraphs),
            self.sum_logprob / max(self.tokens, 1),
            self.min_logprob,
            self.paragraph_sum_logprob / max(self.paragraph_tokens, 1),
            self.paragraph_min_logprob,
            entropy,
        ]


def _least(first: float, second: float) -> float:
    """The smaller number; NaN where one is NaN."""
    return second if second < first or math.isnan(second) else first


@dataclass(slots=True)
class HostDecision:
    """Smoothed signals and the verdict after a token; the fields are those of `Decision`."""

    smoothed: list[float] = field(default_factory=lambda: [0.0] * len(SIGNALS))
    seen: bool = False
    held: int = 0
    forcing: int = 0

    def advance(
        self,
        span: HostSpan,
        signals: Sequence[float],
        policy: ExitPolicy,
        end_length: int,
        *,
        allowed: Sequence[bool] | None = None,
    ) -> HostVerdict:
        """`decide` for one token.

        Args:
            span: After the token.
            signals: At the token, in the order of `SIGNALS`; read where it is a boundary alone.
            policy: When to exit; it smooths over boundaries.
            end_length: Tokens of the think end.
            allowed: Whether a grammar allows each of them behind the token; None: no grammar.
        """
        closes = span.closes
        if closes:
            self._smooth(signals, policy.ewma)
            self.held = self.held + 1 if holds(policy, self.smoothed) else 0
        ready = closes and self.held >= policy.patience and span.tokens >= policy.min_thinking_tokens
        due = (ready and self.forcing == 0) or 0 < self.forcing < end_length
        self.forcing = end_length if span.over else self.forcing + due
        blocked = due and allowed is not None and not allowed[max(self.forcing - 1, 0)]
        if blocked:
            self.forcing = 0
        return HostVerdict(due and not blocked, blocked)

    def _smooth(self, signals: Sequence[float], ewma: float) -> None:
        values = list(signals)
        if self.seen:
            values = [ewma_step(average, value, ewma) for average, value in zip(self.smoothed, values, strict=True)]
        self.smoothed, self.seen = values, True


class HostVerdict(NamedTuple):
    """What the rule says behind a token."""

    due: bool
    """Whether a token of the think end must come next: the one that `forcing` counts last."""
    blocked: bool
    """Whether the grammar forbids it."""


def holds(policy: ExitPolicy, smoothed: Sequence[float]) -> bool:
    """`ExitPolicy.holds` for one row."""
    if policy.predicate == "never":
        return False
    values = dict(zip(SIGNALS, smoothed, strict=True))
    if policy.score is not None:
        score = policy.score
        total = score.bias + sum(
            weight * _scored(name, values[name]) for name, weight in zip(score.signals, score.weights, strict=True)
        )
        return 0.5 + 0.5 * math.tanh(total / 2) > score.threshold
    votes = (
        values[name] < bound if BY_NAME[name].falls else values[name] > bound
        for name, bound in policy.thresholds.items()
    )
    return all(votes) if policy.predicate == "all" else any(votes)


def _scored(name: str, value: float) -> float:
    if BY_NAME[name].score_transform == "identity":
        return value
    return math.log1p(value) if value > -1 else math.nan

"""Reads what a server sends, piece by piece: where the answer is complete, and how many tokens that took."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ace_learn.contracts import JSON, Commit, Contract

CountedBy = Literal["usage", "token_ids", "logprobs", "chunks"]
"""What token counts rest on: the server's usage, the ids or log-probabilities that it sent, or one token per chunk."""
PieceKind = Literal["content", "reasoning", "raw"]
"""The answer's channel, the channel that a server sends thinking in, or text whose markers say which it is."""


class Piece(NamedTuple):
    """Text that arrived together."""

    text: str
    tokens: int
    kind: PieceKind = "content"
    token_texts: tuple[bytes, ...] = ()
    """UTF-8 of each token, where the server says; it may hold more than the text (the thinking, an end of turn)."""


class TokensRead(NamedTuple):
    """Token counts of a text read so far."""

    received: int
    """All that arrived."""
    kept: int
    """Up to the token that completes the answer; all, where none is complete."""
    thought: int
    """Those of the think spans."""


class Texts(NamedTuple):
    """A text, its thinking apart."""

    answer: str
    thinking: str


@dataclass(frozen=True, kw_only=True)
class ServedOutput:
    """A finished request to a server."""

    key: int
    text: str
    """Text outside the thinking, cut behind the answer."""
    thinking: str
    """The thinking, whichever way the server sent it."""
    answer: JSON
    """The contract's answer; None without one."""
    finish_reason: str
    """`contract` (closed at the commit), what the server said (`stop`, `length`, ...), `timeout`, or `error`."""
    tokens: int
    """Output tokens received: those of the attempt that gave the text."""
    kept_tokens: int
    """Of these, up to the one that completes the answer; the others are surplus."""
    think_tokens: int
    counted_by: CountedBy
    """What the three counts rest on; `chunks` is an estimate, and too low where a chunk holds several tokens."""
    seconds: float
    """From the request's start to its end, all attempts and waits included; with a commit, the time to the answer."""
    first_token_s: float | None
    """From the request's start to its first text; None if none came."""
    calls: int
    """Calls that gave the text: 1 when streamed, one per chunk otherwise."""
    attempts: int
    """Calls made, failed ones included."""
    lost_tokens: int = 0
    """Tokens received by attempts that broke off."""
    error: str | None = None
    """Why there is no whole output."""


class AnswerReader:
    """Feeds a contract's committer with what a server sends, and keeps count.

    Where thinking comes in a channel of its own, the committer sees its think markers and nothing of the thinking, so
    that both ways of sending it mean the same. A contract of scope `anywhere` reads the thinking like any other text.
    """

    def __init__(self, contract: Contract, *, starts_in_think: bool = False) -> None:
        """Start a text.

        Args:
            contract: What counts as an answer.
            starts_in_think: The prompt's template has opened the think span, and the text goes on inside it. Leave it
                off where the server sends the thinking in a channel of its own.
        """
        self._contract = contract
        self._starts_in_think = starts_in_think
        self._committer = contract.committer(starts_in_think=starts_in_think)
        self._channel_open = False
        self._fed: list[str] = []
        self._thinking: list[str] = []
        self._pieces: list[Piece] = []
        self._ends: list[int] = []
        self._length = 0
        self.commit: Commit | None = None

    def read(self, piece: Piece) -> Commit | None:
        """Read on; the commit once there is one, and the same one ever after."""
        apart = self._contract.scope == "answer"
        if apart and piece.text and piece.kind != "raw":
            self._switch(open_channel=piece.kind == "reasoning")
        if piece.kind == "reasoning":
            self._thinking.append(piece.text)
        if piece.kind != "reasoning" or not apart:
            self._feed(piece.text)
        self._pieces.append(piece)
        self._ends.append(self._length)
        return self.commit

    def close(self, *, truncated: bool) -> Commit | None:
        """The text ends here; see `Committer.close`."""
        self.commit = self._committer.close(truncated=truncated)
        return self.commit

    @property
    def raw(self) -> str:
        """All that was read, thinking included, as the model writes it: think markers and all."""
        start, end = self._contract.think_start, self._contract.think_end
        text, channel = start if self._starts_in_think else "", False
        for piece in self._pieces:
            opens = piece.kind == "reasoning"
            if piece.text and piece.kind != "raw" and opens != channel:
                already = opens and text == start and self._starts_in_think
                text += "" if already else start if opens else end
                channel = opens
            text += piece.text
        return text

    @property
    def answering(self) -> bool:
        """Whether some of the answer's channel has come."""
        return any(piece.text and piece.kind == "content" for piece in self._pieces)

    def texts(self) -> Texts:
        """The text up to the commit, its thinking apart."""
        text = "".join(self._fed)
        text = text if self.commit is None else text[: self.commit.end]
        if self._contract.scope == "anywhere":
            return Texts(text, "")
        spans = _think_spans(text, self._contract, starts_in_think=self._starts_in_think)
        answer, thinking, at = "", "", 0
        for span in spans:
            answer += text[at : span.start]
            thinking += text[span.start + len(span.opened) : span.stop - len(span.closed)]
            at = span.stop
        return Texts(answer + text[at:], "".join(self._thinking) + thinking)

    def tokens(self) -> TokensRead:
        """Counts of what was read."""
        received = sum(piece.tokens for piece in self._pieces)
        kept = received if self.commit is None else self._tokens_at(self.commit.end)
        if self._contract.scope == "anywhere":
            return TokensRead(received, kept, sum(p.tokens for p in self._pieces if p.kind == "reasoning"))
        text, thought = "".join(self._fed), 0
        for span in _think_spans(text, self._contract, starts_in_think=self._starts_in_think):
            thought += (self._tokens_at(span.stop) if span.closed else received) - self._tokens_at(span.start)
        return TokensRead(received, kept, thought)

    def _switch(self, *, open_channel: bool) -> None:
        if open_channel != self._channel_open:
            already = open_channel and self._starts_in_think and not self._pieces
            self._feed("" if already else self._contract.think_start if open_channel else self._contract.think_end)
            self._channel_open = open_channel

    def _feed(self, text: str) -> None:
        self._fed.append(text)
        self._length += len(text)
        self.commit = self._committer.feed(text)

    def _tokens_at(self, offset: int) -> int:
        """Tokens up to the one in which `offset` of the fed text falls."""
        index = bisect_left(self._ends, offset)
        before = sum(piece.tokens for piece in self._pieces[:index])
        if index == len(self._pieces) or offset == 0:
            return before
        piece = self._pieces[index]
        return before + piece.tokens - tokens_behind(piece, len(piece.text) - (self._ends[index] - offset))


def tokens_behind(piece: Piece, cut: int) -> int:
    """Tokens of a piece that lie wholly behind a character of its text.

    They are counted from the end by the tokens' own texts, an end of turn that shows no text included; without these
    texts, by their share of the characters.
    """
    text, keep = piece.text.encode(), len(piece.text[:cut].encode())
    end = len(text)
    for behind, token in enumerate(reversed(piece.token_texts)):
        if text.endswith(token, 0, end):
            end -= len(token)
            if end < keep:
                return min(behind, piece.tokens)
        elif end < len(text):
            break  # the texts do not join to this one
    return piece.tokens - math.ceil(piece.tokens * cut / max(1, len(piece.text)))


class _Span(NamedTuple):
    start: int
    stop: int
    opened: str
    closed: str


def _think_spans(text: str, contract: Contract, *, starts_in_think: bool) -> Sequence[_Span]:
    """Think spans with their markers; an end without a start means that what came before was thinking, too."""
    start, end = contract.think_start, contract.think_end
    spans: list[_Span] = []
    at, opened = 0, "" if starts_in_think else None
    begin = 0
    while True:
        if opened is None:
            first_start, first_end = text.find(start, at), text.find(end, at)
            if first_start < 0 and first_end < 0:
                return spans
            orphan = first_start < 0 or 0 <= first_end < first_start
            begin, opened = (at, "") if orphan else (first_start, start)
        stop = text.find(end, begin + len(opened))
        if stop < 0:
            return [*spans, _Span(begin, len(text), opened, "")]
        at = stop + len(end)
        spans.append(_Span(begin, at, opened, end))
        opened = None

"""Contracts on token ids: an incremental detokeniser in front of a committer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ace_learn.contracts.committer import Commit, Committer

Decode = Callable[[Sequence[int]], str]
"""E.g. `functools.partial(tokenizer.decode, skip_special_tokens=False)`."""

_REPLACEMENT = "\ufffd"
_WINDOW = 16
"""Tokens decoded together at most, so that a push costs the same wherever it is in the text."""
_CONTEXT = 6
"""Tokens before the new ones: some tokenizers render a token differently at the very start."""


@runtime_checkable
class TextCommitter(Protocol):
    """What reads the text: a committer, or anything that finds an end in the same way."""

    def feed(self, text: str) -> Commit | None:
        """Read on."""
        ...

    def close(self, *, truncated: bool = False) -> Commit | None:
        """End of generation."""
        ...


class TokenCommit(NamedTuple):
    """A settled answer, and how many tokens reach it."""

    commit: Commit
    num_tokens: int
    """Tokens to keep. The last one may hold more text than `commit.end`, which cuts it."""
    surplus: int = 0
    """Characters of the kept tokens behind `commit.end`."""


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces join to the text of all ids.

    The end of a text that decodes to U+FFFD is held back, since it may be a character of which not
    all bytes are there. An unfinished character is one U+FFFD, so no more than one is held back.
    """

    def __init__(self, decode: Decode) -> None:
        """Use `decode` for windows of token ids."""
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if len(self._window) >= _WINDOW:
            # Everything stable is out, so the same holds for a shorter window.
            self._window = self._window[-_CONTEXT:]
            text = self._decode(self._window)
            self._emitted = len(text) - text.endswith(_REPLACEMENT)
        return piece

    def flush(self) -> str:
        """What was held back: the text ends here."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece


class TokenStream:
    """A committer that reads token ids."""

    def __init__(self, committer: TextCommitter, decode: Decode) -> None:
        """Feed `committer` with the text of the tokens.

        Args:
            committer: A fresh committer.
            decode: Decodes a list of token ids, special tokens included.
        """
        self._committer = committer
        self._detokenizer = Detokenizer(decode)
        self._ends: list[int] = []
        self._commit: TokenCommit | None = None

    def push(self, token_ids: Sequence[int]) -> TokenCommit | None:
        """Read on; the commit once there is one, and the same one ever after.

        Tokens behind the one in which `commit.end` falls only served to decide and are not kept.
        """
        for token_id in token_ids:
            if self._commit is not None:
                break
            self._read(self._detokenizer.push(token_id))
        return self._commit

    @property
    def num_sure(self) -> int:
        """Tokens read that a commit yet to come will keep whole; those behind them may only serve to decide."""
        held = self._committer.held if isinstance(self._committer, Committer) else None
        return len(self._ends) if held is None else bisect_right(self._ends, held)

    def close(self, *, truncated: bool = False) -> TokenCommit | None:
        """End of generation; see :meth:`Committer.close`."""
        if self._commit is None and self._ends:
            rest = self._detokenizer.flush()
            self._ends[-1] += len(rest)
            self._settle(self._committer.feed(rest) if rest else None)
        if self._commit is None:
            self._settle(self._committer.close(truncated=truncated))
        return self._commit

    def _read(self, piece: str) -> None:
        before = self._ends[-1] if self._ends else 0
        self._ends.append(before + len(piece))
        self._settle(self._committer.feed(piece) if piece else None)

    def _settle(self, commit: Commit | None) -> None:
        if commit is not None:
            last = bisect_left(self._ends, commit.end)
            self._commit = TokenCommit(commit, last + 1, self._ends[last] - commit.end)

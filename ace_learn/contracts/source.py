"""A growing text that parsers read as coroutines.

Every contract is a parser written as a generator: it reads characters from a :class:`Source` and
yields whenever it needs text that has not arrived. A decision is thus a function of the characters
that were read, so it cannot depend on how the text was cut into chunks, and nothing that was read
is read again on the next chunk.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Self, TypeVar

from ace_learn.contracts.chars import APOSTROPHES

T = TypeVar("T")

Step = Generator[None, None, T]
"""A resumable computation: yields None to ask for more text, returns a T."""

_WORD = re.compile(rf"[^\W\d_]+(?:[{APOSTROPHES}][^\W\d_]+)*")
_MAX_WORD = 32


class Source:
    """Text that arrives in pieces, and a reading position in it.

    Text before the position is dropped as new text arrives, except for `lookback` characters and
    for what stands after a :meth:`mark`.
    """

    def __init__(self, *, base: int = 0, lookback: int = 0) -> None:
        """Start an empty source.

        Args:
            base: Offset of the first character in the whole text.
            lookback: How many characters before the position :meth:`before` may be asked for.
        """
        self.buf = ""
        self.pos = 0
        self.closed = False
        self._base = base
        self._lookback = lookback
        self.hold: int | None = None
        """Where what is read began, for a parser that marks other places meanwhile."""
        self._mark: int | None = None
        self._kept: list[str] = []
        self._kept_size = 0

    @classmethod
    def whole(cls, text: str) -> Self:
        """A source that holds all of its text, so that no parser waits on it."""
        source = cls()
        source.buf = text
        source.closed = True
        return source

    @property
    def offset(self) -> int:
        """Offset of the reading position in the whole text."""
        return self._base + self.pos

    @property
    def held(self) -> int | None:
        """Offset at which something began that is not decided; None where nothing is under way."""
        return self._mark if self.hold is None else self.hold

    def push(self, text: str) -> None:
        """Append text, dropping what can no longer be asked for."""
        cut = self.pos - self._lookback
        if cut <= 0:
            self.buf += text
            return
        if self._mark is not None:
            self._kept.append(self.buf[:cut])
            self._kept_size += cut
        self.buf = self.buf[cut:] + text
        self.pos -= cut
        self._base += cut

    def before(self, count: int) -> str:
        """Up to `count` characters before the position; `count` is at most the look-back."""
        return self.buf[max(0, self.pos - count) : self.pos]

    def mark(self) -> None:
        """Keep the text from here on, for :meth:`marked` or :meth:`rewind`."""
        self._mark = self.offset
        self._kept = []
        self._kept_size = 0

    def unmark(self) -> None:
        """Let go of the marked text."""
        self._mark = None
        self._kept = []
        self._kept_size = 0

    def marked(self) -> str:
        """The text from the mark to the position."""
        assert self._mark is not None, "marked() needs mark()"
        since = self._mark - (self._base - self._kept_size)
        return ("".join(self._kept) + self.buf[: self.pos])[since:]

    def rewind(self) -> None:
        """Go back to the mark and let go of it; the look-back before it is there again."""
        assert self._mark is not None, "rewind() needs mark()"
        if self._kept_size:
            self.buf = "".join(self._kept) + self.buf
            self._base -= self._kept_size
        self.pos = self._mark - self._base
        self.unmark()

    def peek(self, ahead: int = 0) -> Step[str]:
        """The character `ahead` of the position, "" past the end of a closed text."""
        while self.pos + ahead >= len(self.buf):
            if self.closed:
                return ""
            yield
        return self.buf[self.pos + ahead]

    def find(self, pattern: re.Pattern[str], limit: int | None = None) -> Step[str]:
        """Move behind the next match and return it; "" if the text ends, or at `limit`.

        A match must be decidable at its last character, i.e. `pattern` may look behind, not ahead,
        and what it matches must be one character long.

        Args:
            pattern: One character, with look-behind at will.
            limit: Offset in the whole text at which to give up.
        """
        while True:
            stop = len(self.buf)
            if limit is not None:
                stop = min(stop, limit - self._base)
            found = pattern.search(self.buf, self.pos, stop)
            if found is not None:
                self.pos = found.end()
                return found.group()
            self.pos = max(self.pos, stop)
            if self.closed or (limit is not None and self.offset >= limit):
                return ""
            yield

    def skip(self, run: re.Pattern[str], limit: int | None = None) -> Step[int]:
        """Move over a run of characters, at most `limit` of them, and return how many.

        Args:
            run: A pattern that matches a run of single characters (`[...]*`).
            limit: The longest run of interest; the position stops behind it.
        """
        count = 0
        while True:
            stop = len(self.buf) if limit is None else min(len(self.buf), self.pos + limit - count)
            found = run.match(self.buf, self.pos, stop)
            if found is not None:
                count += found.end() - self.pos
                self.pos = found.end()
            if self.pos < len(self.buf) or self.closed or count == limit:
                return count
            yield

    def stands(self, literal: str, *, fold: bool = False) -> Step[bool]:
        """Whether `literal` stands here; asks for no more text than it takes to tell."""
        for ahead, wanted in enumerate(literal):
            char = yield from self.peek(ahead)
            if char != wanted and not (fold and char.lower() == wanted.lower()):
                return False
        return True

    def accept(self, literals: tuple[str, ...], *, fold: bool = False) -> Step[str]:
        """Move over the first of `literals` that stands here and return it, else "".

        Args:
            literals: Tried in order, so a prefix of another one stands behind it.
            fold: Ignore case.
        """
        for literal in literals:
            if (yield from self.stands(literal, fold=fold)):
                self.pos += len(literal)
                return literal
        return ""

    def word(self, ahead: int = 0) -> Step[str]:
        """The word `ahead` of the position in lower case, without moving; "" if there is none."""
        while True:
            found = _WORD.match(self.buf, self.pos + ahead)
            word = "" if found is None else found.group()
            end = self.pos + ahead + len(word)
            # An apostrophe at the very end may go on ("isn't").
            open_end = end >= len(self.buf) or (end + 1 == len(self.buf) and self.buf[end] in APOSTROPHES)
            if not open_end or self.closed or len(word) > _MAX_WORD:
                return word[:_MAX_WORD].lower().replace(APOSTROPHES[1], APOSTROPHES[0])
            yield

"""The streaming side of a contract: think spans are skipped, the rest is read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON


class Commit(NamedTuple):
    """A settled answer."""

    answer: JSON
    end: int
    """Character offset at which the text may be cut."""


class Markers(NamedTuple):
    """The texts that open and close a think span."""

    start: str
    end: str


class _Piece(NamedTuple):
    text: str
    offset: int
    fresh: bool
    """A think span stood before it: nothing that was pending goes on here."""


class ThinkFilter:
    """Cuts think spans out of a text that arrives in pieces; markers may be cut anywhere."""

    def __init__(self, markers: Markers, *, in_think: bool) -> None:
        """Start at the beginning of the text, inside a think span or not."""
        self._markers = markers
        self._in_think = in_think
        self._fresh = False
        self._held = ""
        self._offset = 0
        self._either = re.compile("|".join(sorted(map(re.escape, markers), key=len, reverse=True)))
        self._first = frozenset(marker[0] for marker in markers)

    def feed(self, text: str) -> Iterator[_Piece]:
        """The pieces of `text` that stand outside think spans.

        An end marker without a start means that what came before was thinking, too.
        """
        text = self._held + text
        self._held = ""
        at = 0
        while True:
            cut = text.find(self._markers.end, at) if self._in_think else -1
            found = None if self._in_think else self._either.search(text, at)
            if cut < 0 and found is None:
                break
            if found is not None:
                if found.start() > at:
                    yield self._piece(text[at : found.start()], at)
                self._in_think = found.group() == self._markers.start
                at = found.end()
            else:
                self._in_think = False
                at = cut + len(self._markers.end)
            self._fresh = True
        keep = len(text) - self._partial(text, at)
        if keep > at and not self._in_think:
            yield self._piece(text[at:keep], at)
        self._held = text[keep:]
        self._offset += keep

    def close(self) -> Iterator[_Piece]:
        """What was held back because it could have begun a marker.

        If the text ends at a marker, the piece is empty but fresh.
        """
        held = "" if self._in_think else self._held
        if held or self._fresh:
            yield self._piece(held, 0)

    def _piece(self, text: str, at: int) -> _Piece:
        fresh, self._fresh = self._fresh, False
        return _Piece(text, self._offset + at, fresh)

    def _partial(self, text: str, at: int) -> int:
        """Length of the longest end of text[at:] that begins a marker."""
        longest = min(len(text) - at, max(map(len, self._markers)) - 1)
        tail = text[len(text) - longest :]
        if self._first.isdisjoint(tail):
            return 0
        wanted = self._markers[1:] if self._in_think else self._markers
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(len(marker) > length and marker.startswith(end) for marker in wanted):
                return length
        return 0


Scan = Callable[[Source], Step[Commit | None]]


class Committer:
    """Reads one generated text piece by piece and commits as soon as the answer is settled.

    Text on the two sides of a think span is never read together: a cue before it does not take an
    answer after it, and a digit run before it stays unsettled.
    """

    def __init__(
        self, scan: Scan, *, markers: Markers | None, in_think: bool, lookback: int, looks_ahead: bool = True
    ) -> None:
        """Use :meth:`Contract.committer`."""
        self._looks_ahead = looks_ahead
        self._scan = scan
        self._lookback = lookback
        self._filter = None if markers is None else ThinkFilter(markers, in_think=in_think)
        self._commit: Commit | None = None
        self._closed = False
        self._begin(0)

    def feed(self, text: str) -> Commit | None:
        """Read on; the commit once there is one, and the same one ever after."""
        if self._commit is None and not self._closed:
            if self._filter is None:
                self._advance(text)
            else:
                self._advance_pieces(self._filter.feed(text))
        return self._commit

    def close(self, *, truncated: bool = False) -> Commit | None:
        """End of generation.

        Args:
            truncated: It was cut by length, so nothing that only a natural end settles is settled:
                a growing digit run, a letter at the very end.
        """
        if self._commit is None and not self._closed and not truncated:
            if self._filter is not None:
                self._advance_pieces(self._filter.close())
            if self._commit is None:
                self._source.closed = True
                self._commit = next(self._steps, None)
        self._closed = True
        return self._commit

    @property
    def held(self) -> int | None:
        """Offset behind which text may only serve to decide, so that a commit may cut it; None where there is none."""
        return self._source.held if self._looks_ahead and self._commit is None else None

    def _begin(self, offset: int) -> None:
        self._source = Source(base=offset, lookback=self._lookback)
        self._steps = _drive(self._scan(self._source))

    def _advance(self, text: str) -> None:
        if text:
            self._source.push(text)
            self._commit = next(self._steps, None)

    def _advance_pieces(self, pieces: Iterator[_Piece]) -> None:
        for piece in pieces:
            if piece.fresh:
                self._begin(piece.offset)
            self._advance(piece.text)
            if self._commit is not None:
                return


def _drive(steps: Step[Commit | None]) -> Generator[Commit | None, None, None]:
    yield (yield from steps)

"""Reading a source line by line."""

from __future__ import annotations

import re

from ace_learn.contracts.source import Source, Step

MAX_LINE = 1 << 16
"""Longest line that is read, in characters."""

_NEWLINE = re.compile(r"\n")


def read_line(source: Source) -> Step[str | None]:
    """The next line with its line break, "" at the end of the text; None for a line over the cap, which is passed."""
    source.mark()
    found = yield from source.find(_NEWLINE, source.offset + MAX_LINE)
    line = source.marked()
    source.unmark()
    if found or len(line) < MAX_LINE:
        return line
    yield from source.find(_NEWLINE)
    return None

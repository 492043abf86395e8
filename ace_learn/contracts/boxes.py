r"""Reading `\boxed{...}`."""

from __future__ import annotations

import re

from ace_learn.contracts.chars import words
from ace_learn.contracts.source import Source, Step

MAX_BOX = 16_384
"""Longest content in characters."""
MAX_DEPTH = 64
"""Deepest nesting of braces; it bounds how often a broken text is read again."""
BOXES = ("\\boxed", "\\fbox")

_SPACES = re.compile(r"[ \t]*")
_BRACE = re.compile(r"[{}\\\n]")
_BLANK = re.compile(r"[\s.…?_$-]*")
_ECHO_HEADS = words("answer your ldots cdots dots cdot")
_ECHO_WORDS = _ECHO_HEADS | words("the final here result goes text textbf quad")


def read_box(source: Source) -> Step[str | None]:
    r"""Read what follows `\boxed`: the content of balanced braces; None if there are none.

    The caller has marked the source behind `\boxed`.

    An escaped brace does not count. A blank line ends the attempt, as it does in TeX, so that a
    box which was never closed does not swallow the rest of the text.
    """
    yield from source.skip(_SPACES, limit=8)
    if (yield from source.peek()) != "{":
        return None
    source.pos += 1
    limit = source.offset + MAX_BOX
    depth = 1
    while True:
        char = yield from source.find(_BRACE, limit)
        if char == "{":
            depth += 1
            if depth > MAX_DEPTH:
                return None
        elif char == "}":
            depth -= 1
            if depth == 0:
                return source.marked().lstrip(" \t")[1:-1]
        elif char == "\\":
            if not (yield from source.peek()):
                return None
            source.pos += 1
        elif not char or (yield from _blank_line(source)):
            return None


def is_echo(content: str) -> bool:
    r"""Whether a box is a blank from the instruction: `{}`, `{...}`, `{your answer}`."""
    if _BLANK.fullmatch(content) is not None:
        return True
    found = set(re.findall(r"[^\W_]+", content[:64].lower()))
    return len(content) <= 64 and found <= _ECHO_WORDS and not found.isdisjoint(_ECHO_HEADS)


def unclosed(content: str) -> bool:
    """Whether `content` could not stand in a box: its braces are not balanced."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", content, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth < 0:
            return True
    return depth != 0


def _blank_line(source: Source) -> Step[bool]:
    yield from source.skip(_SPACES, limit=256)
    return (yield from source.peek()) in ("\n", "\r")

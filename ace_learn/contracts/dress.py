r"""What stands between a cue and an answer, and around an answer: `is: **$\text{(B)}$**`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ace_learn.contracts.chars import APOSTROPHES, QUOTES, WIDE_BRACKETS, WIDE_COLON, is_word_char, words
from ace_learn.contracts.cues import Trigger
from ace_learn.contracts.source import Source, Step

SPACES = re.compile(r"[ \t]*")
_WHITE = re.compile(r"\s*")
_MARKS = re.compile(rf"[*_`{QUOTES}]*")
_MAX_WHITE = 64
_MAX_OPENERS = 16

_FILLERS = words("therefore thus hence clearly indeed simply just definitely then the")
_GROUPS = tuple(f"\\{name}{{" for name in ("textbf", "textrm", "textit", "text", "mathbf", "mathrm", "mathsf", "mbox"))
_CLOSERS = {
    "(": ")",
    "[": "]",
    "{": "}",
    **WIDE_BRACKETS,
    "\\left(": "\\right)",
    **dict.fromkeys(_GROUPS, "}"),
}
_LOOSE = ("$", "*", "_", "`", *QUOTES, "\\(", "\\[", "\\,", "\\ ", "~", ">")
_OPENERS = (*_CLOSERS, *_LOOSE)
_INNER = ("*", "_", "`", "\\,", "\\ ", "~", "$", " ", "\t")
_MATHS_END = ("$", "\\)", "\\]")


@dataclass
class Dress:
    """What was opened before an answer."""

    closers: list[str] = field(default_factory=list)
    """What closes the brackets and braces around the answer, innermost last."""
    on_new_line: bool = False
    """A line break stands between cue and answer."""

    @property
    def bracketed(self) -> bool:
        """Whether a bracket (not only a LaTeX group) encloses the answer."""
        return any(closer != "}" for closer in self.closers)


def read_dress(source: Source, trigger: Trigger, nouns: tuple[str, ...]) -> Step[Dress | None]:
    """Read from a cue to where the answer must stand; None if the cue announces nothing.

    Args:
        source: Stands right behind the cue.
        trigger: The cue.
        nouns: Words that may name the answer, as in "is option (B)".
    """
    if trigger.ends_word and (yield from _word_goes_on(source)):
        return None
    separated = (yield from _skip_separators(source)) or trigger.strong
    if not separated:
        at_line_end = (yield from source.peek()) in ("\n", "\r")
        if not (trigger.heading and at_line_end):
            return None
    start = source.offset
    yield from source.skip(_WHITE, limit=_MAX_WHITE)
    dress = Dress(on_new_line="\n" in source.before(source.offset - start))
    yield from read_openers(source, dress)
    for _ in range(3):
        word = yield from source.word()
        if word not in _FILLERS and word not in nouns:
            break
        if (yield from source.peek(len(word))) not in (" ", ","):
            break
        source.pos += len(word) + 1
        yield from source.skip(SPACES, limit=_MAX_WHITE)
        yield from read_openers(source, dress)
    return dress


def read_openers(source: Source, dress: Dress) -> Step[None]:
    """Move over brackets, LaTeX groups and marks that may stand before an answer."""
    for _ in range(_MAX_OPENERS):
        opener = yield from source.accept(_OPENERS)
        if not opener:
            return
        if opener in _CLOSERS:
            dress.closers.append(_CLOSERS[opener])
        yield from source.skip(SPACES, limit=_MAX_WHITE)


def read_closers(source: Source, dress: Dress) -> Step[int | None]:
    """Close what `dress` opened.

    Returns:
        The offset behind the last delimiter; None if something stands before one.
    """
    end = source.offset
    for closer in reversed(dress.closers):
        for _ in range(_MAX_OPENERS):
            if not (yield from source.accept(_INNER)):
                break
        if not (yield from source.accept((closer,))):
            return None
        end = source.offset
    return end


def read_trail(source: Source) -> Step[bool]:
    """Move over closing marks.

    Returns:
        Whether they close something: in 2**5 and B's they do not.
    """
    moved = False
    for _ in range(_MAX_OPENERS):
        marks = yield from source.skip(_MARKS, limit=8)
        maths = yield from source.accept(_MATHS_END)
        if not marks and not maths:
            break
        moved = True
    if not moved:
        return True
    char = yield from source.peek()
    return not (is_word_char(char) or (char != "" and char in "({\\"))


def _word_goes_on(source: Source) -> Step[bool]:
    char = yield from source.peek()
    if char and char in APOSTROPHES:
        return is_word_char((yield from source.peek(1)))
    return is_word_char(char) or char == "-"


def _skip_separators(source: Source) -> Step[bool]:
    """Move over ":", "is", "=" and marks between a cue and what it announces."""
    separated = False
    for _ in range(4):
        yield from source.skip(_MARKS, limit=8)
        yield from source.skip(SPACES, limit=_MAX_WHITE)
        if (yield from source.accept((":", WIDE_COLON, "=", "→", "->"))):
            separated = True
        elif (yield from source.word()) == "is":
            source.pos += 2
            separated = True
        else:
            break
    return separated

"""Cues: the words that announce an answer, and the contexts in which they announce none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ace_learn.contracts.boxes import BOXES
from ace_learn.contracts.chars import APOSTROPHES, CJK
from ace_learn.contracts.source import Source, Step

MAX_CUE = 64
LOOKBACK = 96 + MAX_CUE
"""Characters before the end of a cue that may decide what it is worth."""

_CJK = re.compile(f"[{CJK}]")

_CLAUSE_END = re.compile(r"[.!?;:,\n]")
_NO = rf"(?:\b(?:not|never|cannot|hardly|neither|nor)\b|n[{APOSTROPHES}]t\b)"
_ATTITUDE = (
    r"(?:think|believe|agree|say|mean|suppose|claim|conclude|imply|sure|certain|true|clear|convinced"
    r"|likely|possible|case|obvious|necessarily|follow|know)"
)
_ARTICLE = r"(?:\s+(?:that|if|whether))?(?:\s+(?:the|my|our|your|a|an|this|its))?"
_ADJECTIVE = r"(?:\s+(?:final|correct|right|best|true|most))*\s*$"
_NEGATED = re.compile(rf"{_NO}(?:(?:\s+\w+){{0,2}}?\s+{_ATTITUDE})?{_ARTICLE}{_ADJECTIVE}", re.IGNORECASE)
_SUPPOSED = re.compile(
    r"\b(?:if|whether|unless|suppos(?:e|ing)|assum(?:e|ing)|imagine|pretend|doubt|perhaps|maybe"
    rf"|possibly|why){_ARTICLE}{_ADJECTIVE}",
    re.IGNORECASE,
)
_SUPERSEDED = re.compile(
    r"\b(?:wrong|incorrect|false|tempting|previous|earlier|initial|original|naive|old)\s*$",
    re.IGNORECASE,
)
_DENIED = re.compile(rf"{_NO}(?:\s+(?:be|equal(?:\s+to)?|in|simply|just))?[\s:$\\(\[*]*$")


class Trigger(NamedTuple):
    """A place at which an answer may begin."""

    box: bool
    strong: bool
    """The cue needs no "is" or ":" behind it."""
    vetoed: bool
    """The clause before it takes it back: "I do not think the answer is"."""
    heading: bool = False
    """The cue begins its line."""
    ends_word: bool = False
    """The cue ends with a letter, so a letter behind it would make it another word."""


class Cues:
    """A set of cues, compiled."""

    def __init__(self, cues: Sequence[str], *, boxes: bool) -> None:
        r"""Compile.

        Args:
            cues: The cues; case is ignored.
            boxes: Whether `\boxed` announces an answer, too.
        """
        self._cues = sorted(cues, key=len, reverse=True)
        behind = [f"(?i:(?<={_left_edge(cue)}{re.escape(cue)}))" for cue in self._cues]
        if boxes:
            behind += [f"(?<={re.escape(box)})" for box in BOXES]
        last = {char for cue in cues for char in (cue[-1].lower(), cue[-1].upper())}
        last = {char for char in last if len(char) == 1} | ({"d", "x"} if boxes else set())
        # A trigger is found by its last character: it is known as soon as it is complete, and two
        # that overlap are met in the same order however the text is cut.
        self._pattern = re.compile(f"[{re.escape(''.join(sorted(last)))}](?:{'|'.join(behind)})")

    def find(self, source: Source) -> Step[Trigger | None]:
        """Move behind the next trigger; None at the end of the text."""
        if not (yield from source.find(self._pattern)):
            return None
        before = source.before(LOOKBACK)
        if before.endswith(BOXES):
            return Trigger(box=True, strong=True, vetoed=denied(before))
        cue = next(c for c in self._cues if before[-len(c) :].lower() == c.lower())
        lead = before[: -len(cue)]
        ends_word = cue[-1].isalnum() and _CJK.match(cue[-1]) is None
        line = lead.rpartition("\n")[2]
        return Trigger(
            box=False,
            strong=" " in cue or not ends_word,
            vetoed=_vetoed(lead),
            ends_word=ends_word,
            heading=re.fullmatch(r"(?i)[\s#*_>]*(?:(?:the|my|final|correct)\s+)*", line) is not None,
        )


def check_cues(cues: Sequence[str]) -> None:
    """Refuse cues that can never or always match.

    Raises:
        ValueError: There is none, or one is blank, padded or too long.
    """
    if not cues:
        raise ValueError("cues is empty; leave it out for the default cues")
    for cue in cues:
        if not cue or cue != cue.strip() or len(cue) > MAX_CUE:
            raise ValueError(f"cue {cue!r} must be 1 to {MAX_CUE} characters without outer spaces")
        if len(cue) != len(cue.lower()):
            raise ValueError(f"cue {cue!r} changes its length in lower case; write it in lower case")


def denied(before: str) -> bool:
    """Whether a box is negated right before it: "it is not ..."."""
    context = before[: before.rindex("\\")]
    return _DENIED.search(context[-64:]) is not None


def _vetoed(lead: str) -> bool:
    clause = _CLAUSE_END.split(lead[-96:])[-1]
    return any(p.search(clause) is not None for p in (_NEGATED, _SUPPOSED, _SUPERSEDED))


def _left_edge(cue: str) -> str:
    """A cue that begins with a letter begins a word, in scripts that have words."""
    return rf"(?<![^\W_{CJK}])" if cue[0].isalnum() and not _CJK.match(cue[0]) else ""


BOX_TRIGGERS = re.compile(r"[dx](?:(?<=\\boxed)|(?<=\\fbox))")

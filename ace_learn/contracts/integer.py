r"""An integer in a box, on a "Final Answer" line or behind another cue.

The answer is a string of decimal digits in canonical form: "42" for 042, "1204" for
1,204. A decimal point with digits makes a decimal, also 204.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.candidates import first_answer
from ace_learn.contracts.chars import MINUS
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.cues import LOOKBACK, Cues, Trigger
from ace_learn.contracts.dress import (
    SPACES,
    Dress,
    read_closers,
    read_dress,
    read_openers,
    read_trail,
)
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.follow import number_stands
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

MAX_DIGITS = 4_300
"""More digits are no answer; it is also where Python's own conversion stops."""

DEFAULT_CUES = ("answer", "####")
"""Each followed by "is" or ":" ("Final Answer: 204", "the answer is 204"), or a heading of its own;
"####" is GSM8K's mark."""

_DIGITS = re.compile(r"[0-9]*")
_SEPARATORS = ("{,}", "\\,", "\\!,", ",\\!", ",")
_UNIT = re.compile(r"(?:\\[ ,])?\s*\\(?:text|mathrm)\{\s*([A-Za-z]+\.?)\s*\}")
_NO_UNIT = re.compile(r"(?i)hundred|thousand|million|billion|trillion|dozen|percent|or|and|pi|mod")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°")
_CANONICAL = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Integer(Contract):
    """The answer is an integer between `minimum` and `maximum`, both included."""

    kind: ClassVar[str] = "integer"
    lookback: ClassVar[int] = LOOKBACK

    minimum: int | None = None
    maximum: int | None = None

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        super().__post_init__()
        low, high = self.minimum, self.maximum
        if low is not None and high is not None and low > high:
            raise ValueError(f"minimum {low} is above maximum {high}; no integer is in between")

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        low, high = fields.integer("minimum"), fields.integer("maximum")
        return cls(minimum=low, maximum=high, **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The bounds that are set."""
        bounds: dict[str, JSON] = {"minimum": self.minimum, "maximum": self.maximum}
        return {key: bound for key, bound in bounds.items() if bound is not None}

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until a cue or a box gives an integer in range."""
        return (yield from first_answer(source, _CUES, _whole, _behind_cue, self.valid))

    def valid(self, answer: JSON) -> bool:
        """An integer in range, as an int or in canonical decimal digits."""
        if isinstance(answer, str) and answer != _canonical(answer):
            return False
        value = _value(answer)
        if value is None:
            return False
        low, high = self.minimum, self.maximum
        return (low is None or low <= value) and (high is None or value <= high)

    def same(self, a: JSON, b: JSON) -> bool:
        """Equal numbers, however they are written: 42, "42", "042"."""
        value = _value(a)
        return value is not None and value == _value(b)

    def instruction(self) -> str:
        """The sentence for the prompt."""
        low, high = self.minimum, self.maximum
        bounds = {
            (True, True): "",
            (False, True): f" of at least {low}",
            (True, False): f" of at most {high}",
            (False, False): f" from {low} to {high}",
        }[low is None, high is None]
        return f'The answer is an integer{bounds}. End with the line "Final Answer: N".'


def read_integer(source: Source) -> Step[str | None]:
    """Read a number in canonical form; what follows it is another matter.

    Groups of three digits are joined: 1,204 and 1{,}204 are 1204. Digits in other groups are no
    number.
    """
    sign = yield from source.accept(("-", MINUS, "+"))
    digits = yield from _digits(source, MAX_DIGITS + 1)
    size = len(digits)
    while digits and (yield from _separator(source)):
        group = yield from _digits(source, 4)
        if len(group) != 3 or size > 3 or len(digits) > MAX_DIGITS:
            return None
        digits += group
    if not digits or len(digits) > MAX_DIGITS:
        return None
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if sign in ("-", MINUS) and digits != "0" else digits


def _digits(source: Source, limit: int) -> Step[str]:
    start = source.offset
    if not (yield from source.skip(_DIGITS, limit)):
        return ""
    marked = source.marked()
    return marked[len(marked) - (source.offset - start) :]


def _separator(source: Source) -> Step[bool]:
    """Move over a thousands separator: one with a digit right behind it."""
    for separator in _SEPARATORS:
        for ahead, wanted in enumerate(separator):
            if (yield from source.peek(ahead)) != wanted:
                break
        else:
            char = yield from source.peek(len(separator))
            if char != "" and char in "0123456789":
                source.pos += len(separator)
                return True
    return False


def _behind_cue(source: Source, trigger: Trigger) -> Step[Commit | None]:
    dress = yield from read_dress(source, trigger, ("number", "integer"))
    number = None if dress is None else (yield from read_integer(source))
    if dress is None or number is None:
        return None
    end = yield from read_closers(source, dress)
    if end is None or not (yield from number_stands(source, on_new_line=dress.on_new_line)):
        return None
    return Commit(number, end)


def _whole(content: Source) -> Step[str | None]:
    """The number that a box holds, and nothing else but marks, degrees and a unit."""
    content.mark()
    dress = Dress()
    yield from content.skip(SPACES)
    yield from read_openers(content, dress)
    number = yield from read_integer(content)
    if number is None or (yield from read_closers(content, dress)) is None:
        return None
    if not (yield from read_trail(content)):
        return None
    rest = content.buf[content.pos :].strip()
    unit = _UNIT.fullmatch(_DEGREES.sub("", rest))
    if unit is not None:
        return None if _NO_UNIT.fullmatch(unit.group(1)) else number
    return number if _DEGREES.sub("", rest) in ("", ".") else None


def _canonical(text: str) -> str | None:
    """The canonical form of decimal digits; None if they are none."""
    if len(text) > MAX_DIGITS + 1 or not _CANONICAL.fullmatch(text):
        return None
    sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text)
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits


def _value(answer: JSON) -> int | None:
    if isinstance(answer, str):
        digits = _canonical(answer.strip())
        return None if digits is None or len(digits.lstrip("-")) > MAX_DIGITS else int(digits)
    return answer if isinstance(answer, int) and not isinstance(answer, bool) else None


_CUES = Cues(DEFAULT_CUES, boxes=True)

"""Reading JSON as it arrives: one pass, strict grammar, caps before anything is parsed."""

from __future__ import annotations

import json
import math
import re

from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

MAX_CHARS = 1_048_576
MAX_DEPTH = 64
MAX_DIGITS = 4_300

_OPEN = re.compile(r"[{\[]")
_WHITE = re.compile(r"[ \t\r\n]*")
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_DIGITS = re.compile(r"[0-9]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSER = {"{": "}", "[": "]"}
_LITERALS = {"t": "true", "f": "false", "n": "null"}


def read_candidate(source: Source) -> Step[str | None]:
    """Read the next outermost object or array.

    Text that breaks the grammar ends a candidate, with all that was inside it, and the search goes
    on with the character that broke it. A candidate over a cap is read to its end (so that its
    inner objects are not taken for outermost ones) and then dropped.

    Returns:
        Its text; "" for one over a cap; None at the end of the text.
    """
    while (yield from source.find(_OPEN)):
        source.pos -= 1
        source.mark()
        start = source.offset
        deepest = yield from _read_value(source)
        if deepest:
            return "" if _over_cap(deepest, source.offset - start) else source.marked()
        source.unmark()
    return None


def _over_cap(depth: int, size: int) -> bool:
    return depth > MAX_DEPTH or size > MAX_CHARS


def _read_value(source: Source) -> Step[int]:
    """Read one object or array; how deep it is nested, 0 if it is broken."""
    stack: list[str] = []
    deepest = 0
    start = source.offset
    wanted = "value"
    while True:
        yield from source.skip(_WHITE)
        char = yield from source.peek()
        if wanted in ("first", "next") and char == stack[-1]:
            source.pos += 1
            stack.pop()
            if not stack:
                return deepest
            wanted = "next"
        elif wanted == "next" and char == ",":
            source.pos += 1
            wanted = "key" if stack[-1] == "}" else "value"
        elif wanted == "key" or (wanted == "first" and stack[-1] == "}"):
            if not (yield from _read_key(source)):
                return 0
            wanted = "value"
        elif wanted != "next" and char in ("{", "["):
            source.pos += 1
            stack.append(_CLOSER[char])
            deepest = max(deepest, len(stack))
            wanted = "first"
        elif wanted != "next" and (yield from _read_scalar(source)):
            wanted = "next"
        else:
            return 0
        if _over_cap(deepest, source.offset - start):
            source.unmark()  # Nobody will ask for its text.


def _read_key(source: Source) -> Step[bool]:
    if (yield from source.peek()) != '"' or not (yield from _read_string(source)):
        return False
    yield from source.skip(_WHITE)
    return bool((yield from source.accept((":",))))


def _read_scalar(source: Source) -> Step[bool]:
    char = yield from source.peek()
    if char == '"':
        return (yield from _read_string(source))
    if char in _LITERALS:
        for wanted in _LITERALS[char]:
            if (yield from source.peek()) != wanted:
                return False
            source.pos += 1
        return True
    return (yield from _read_number(source))


def _read_string(source: Source) -> Step[bool]:
    source.pos += 1
    while True:
        char = yield from source.find(_STRING_STOP)
        if char == '"':
            return True
        if char != "\\":
            # A control character; it stays, since it may not belong to what is broken.
            source.pos -= bool(char)
            return False
        escaped = yield from source.peek()
        if escaped == "" or escaped not in '"\\/bfnrtu':
            return False
        source.pos += 1
        for _ in range(4 if escaped == "u" else 0):
            if (yield from source.peek()) not in _HEX:
                return False
            source.pos += 1


def _read_number(source: Source) -> Step[bool]:
    yield from source.accept(("-",))
    zero = (yield from source.peek()) == "0"
    count = yield from source.skip(_DIGITS)
    if count == 0 or (zero and count > 1):
        return False
    if (yield from source.accept((".",))) and not (yield from source.skip(_DIGITS)):
        return False
    if (yield from source.accept(("e", "E"))):
        yield from source.accept(("+", "-"))
        return bool((yield from source.skip(_DIGITS)))
    return True


def parse(text: str) -> JSON:
    """Parse one candidate, strictly.

    Raises:
        ValueError: A key is there twice, a number is infinite or too long, or a lone surrogate
            makes the text no Unicode.
    """
    value: JSON = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value

"""What follows an answer and takes it back: an extension, an alternative, a question mark."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ace_learn.contracts.chars import DASHES, MINUS, MYRIADS, is_word_char, words
from ace_learn.contracts.dress import SPACES, Dress, read_openers, read_trail
from ace_learn.contracts.source import Source, Step

_LINE_ENDS = frozenset(("", "\n", "\r"))
_OPERATORS = frozenset("+=<>^/|&\u00d7÷·*~≤≥≠≈±\u222a∩√π∞")
_NUMBER_OPERATORS = _OPERATORS - {"="} | {"!", "%"}  # 20 = 4 * 5 is 20, but 5! and 5% are not 5.
_NOT_IT = words("isn't wasn't aren't cannot can't not wrong incorrect false doubtful impossible")
_JOINTS = words("and to through vs versus plus")
_PLURAL = words("or and are were both nor as")
_AFTER_ARTICLE = words(  # What may follow "A" or "I" when it is the letter and not the word.
    "because since as is for and or by due with from which where while so given but not in via when"
    " if after based according it this that the are"
)
_EXTENDING = words(  # "20 million" is not 20.
    "hundred thousand million billion trillion dozen percent pi sqrt root squared cubed factorial"
    " times plus minus over choose divided multiplied mod modulo point half to or"
)


@runtime_checkable
class Reader(Protocol):
    """Reads one more answer at the position; whether there is one."""

    def __call__(self, source: Source) -> Step[bool]:
        """Read it."""


def option_stands(source: Source, option: str, another: Reader) -> Step[bool]:
    """Whether what follows leaves `option` as the answer.

    Args:
        source: Stands behind the option and its brackets.
        option: The option.
        another: Reads an option, to recognise an alternative.
    """
    if not (yield from read_trail(source)):
        return False
    char = yield from source.peek()
    if char in _LINE_ENDS:
        return True
    after = yield from source.peek(1)
    if char in ".…?":
        return char == "." and after != "." and not is_word_char(after)
    if char in _OPERATORS or char == "\\" or (char in DASHES and is_word_char(after)):
        return False
    if char in ",;":
        source.pos += 1
        yield from source.skip(SPACES, limit=8)
        return not (yield from _alternative_follows(source, another))
    if char not in " \t":
        return True
    yield from source.skip(SPACES, limit=64)
    return (yield from _option_stands_before_word(source, option, another))


def _option_stands_before_word(source: Source, option: str, another: Reader) -> Step[bool]:
    char = yield from source.peek()
    if char in _LINE_ENDS:
        return True
    if char in _OPERATORS or char in "?\\":
        return False
    if char in DASHES or char == "(":
        source.pos += 1
        yield from source.skip(SPACES, limit=8)
        return not (yield from _alternative_follows(source, another))
    word = yield from source.word()
    if word == "or" or word in _NOT_IT - {"not"}:
        return False
    if word == "is":
        source.pos += 2
        yield from source.skip(SPACES, limit=8)
        return (yield from source.word()) not in _NOT_IT
    if option in ("A", "I") and word and word not in _AFTER_ARTICLE:
        return False
    if word in _JOINTS:
        source.pos += len(word)
        yield from source.skip(SPACES, limit=8)
    return not (yield from _alternative_follows(source, another))


def _alternative_follows(source: Source, another: Reader) -> Step[bool]:
    """Whether a list of answers goes on here; in "B, C is wrong" it does not."""
    word = yield from source.word()
    if word == "or":
        return True
    if word == "and":
        source.pos += 3
        yield from source.skip(SPACES, limit=8)
    yield from read_openers(source, Dress())
    if not (yield from another(source)):
        return False
    if (yield from source.peek()) not in (" ", "\t"):
        return True
    yield from source.skip(SPACES, limit=8)
    subject_of = yield from source.word()
    return not subject_of or subject_of in _PLURAL


def number_stands(source: Source, *, on_new_line: bool) -> Step[bool]:
    """Whether what follows neither extends the number nor offers another one.

    Args:
        source: Stands behind the number and its brackets.
        on_new_line: The number begins a line of its own, so "1. First" is an item of a list.
    """
    if not (yield from read_trail(source)):
        return False
    char = yield from source.peek()
    if char in _LINE_ENDS:
        return True
    after = yield from source.peek(1)
    if char in ".)" and on_new_line and after in (" ", "\t"):
        source.pos += 1
        yield from source.skip(SPACES, limit=64)
        return (yield from source.peek()) in _LINE_ENDS
    if char == ".":
        return after != "." and not is_word_char(after)
    if char in f"…?\\({{{MYRIADS}" or char in _NUMBER_OPERATORS or is_word_char(char):
        return False
    if char in DASHES:
        return after == " "
    if char in ":—":
        return not after.isdigit()
    if char in ",;":
        source.pos += 1
        yield from source.skip(SPACES, limit=8)
        return not (yield from _number_follows(source))
    if char not in " \t":
        return True
    yield from source.skip(SPACES, limit=64)
    return (yield from _number_stands_before_word(source))


def _number_stands_before_word(source: Source) -> Step[bool]:
    char = yield from source.peek()
    if char in _LINE_ENDS:
        return True
    if char in _NUMBER_OPERATORS or char in "?\\$" or char.isnumeric():
        return False
    if char in DASHES:
        source.pos += 1
        yield from source.skip(SPACES, limit=8)
        word = yield from source.word()
        return len(word) > 1 and word not in _EXTENDING
    word = yield from source.word()
    if word == "or" or (len(word) == 1 and word not in "ai"):
        return False
    if word == "and":
        source.pos += len(word)
        yield from source.skip(SPACES, limit=8)
        half = (yield from source.word()) in ("a", "half")
        return not half and not (yield from _number_follows(source))
    return word not in _EXTENDING


def _number_follows(source: Source) -> Step[bool]:
    if (yield from source.word()) == "or":
        return True
    yield from read_openers(source, Dress())
    char = yield from source.peek()
    if char in ("-", MINUS, "+"):
        char = yield from source.peek(1)
    return char.isnumeric()

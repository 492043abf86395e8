"""Characters and word lists that the parsers share."""

from __future__ import annotations

MINUS = "\u2212"
EN_DASH = "\u2013"
DASHES = frozenset(f"-{EN_DASH}{MINUS}")
APOSTROPHES = "'\u2019"
QUOTES = "\"'\u201c\u201d\u2018\u2019"
WIDE_COLON = "\uff1a"
WIDE_BRACKETS = {"\uff08": "\uff09", "\u3010": "\u3011"}
MYRIADS = "\u4e07\u4ebf\u5343\u767e\u5341"
"""Chinese characters that multiply the number before them, by 10,000 down to 10."""

CJK = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
"""Scripts (and their punctuation) that put no space between words, as a range for a pattern."""


def is_word_char(char: str) -> bool:
    """A letter or digit of a script that puts spaces between words."""
    return char.isalnum() and not "\u3000" <= char <= "\u9fff"


def words(text: str) -> frozenset[str]:
    """A set of words from a text."""
    return frozenset(text.split())

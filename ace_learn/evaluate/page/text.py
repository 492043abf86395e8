"""Text that a model wrote, made fit for a page. The template engine escapes; this is about what escaping leaves."""

import re

MAX_CHARACTERS = 6000
"""Longer texts are cut, since a model that loops must not make a page that nobody can open."""

# Line ends and tabs stay. Marks that reorder text would let it change what stands around it.
_UNFIT = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def clean(text: str) -> str:
    """A text whose control characters are shown instead of obeyed."""
    return _UNFIT.sub(_shown, text.replace("\r\n", "\n"))


def shortened(text: str, limit: int = MAX_CHARACTERS) -> str:
    """A text of at most about `limit` characters that says how much is missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def _shown(found: re.Match[str]) -> str:
    return f"[U+{ord(found[0]):04X}]"

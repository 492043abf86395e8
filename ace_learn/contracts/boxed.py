r"""The first `\boxed{...}` or `\fbox{...}`.

Equality is textual after a light normalisation; `equality: math` adds mathematical equality.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ace_learn.contracts import maths
from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.boxes import MAX_BOX, is_echo, read_box, unclosed
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.cues import BOX_TRIGGERS, LOOKBACK, denied
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

_SPACING = re.compile(r"\\[!,;: ]|\s|~|\\(?:left|right)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


@dataclass(frozen=True, kw_only=True)
class Boxed(Contract):
    r"""The answer is the content of the first `\boxed{...}` that is not a blank to fill in."""

    kind: ClassVar[str] = "boxed"
    lookback: ClassVar[int] = LOOKBACK

    equality: Literal["text", "math"] = "text"
    """`math`: answers whose texts differ are compared by math-verify (the extra `math`)."""

    def __post_init__(self) -> None:
        """Refuse an equality that is unknown or not installed."""
        super().__post_init__()
        if self.equality not in ("text", "math"):
            raise ValueError(f'equality is {self.equality!r}; write "text" or "math"')
        if self.equality == "math":
            maths.require()

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        equality = fields.string("equality", default="text")
        if equality not in ("text", "math"):
            raise ValueError(f'contract key "equality" is {equality!r}; write "text" or "math"')
        return cls(equality="math" if equality == "math" else "text", **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The equality, where it is not that of texts."""
        return {} if self.equality == "text" else {"equality": self.equality}

    def in_prose(self) -> Contract:
        """Compares texts: what an exit rule reads must not depend on how fast a value is computed."""
        return replace(self, scope="anywhere", equality="text")

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until a box closes."""
        while (yield from source.find(BOX_TRIGGERS)):
            source.mark()
            negated = denied(source.before(LOOKBACK))
            content = yield from read_box(source)
            if content is not None and not negated and not is_echo(content):
                return Commit(content.strip(), source.offset)
            source.rewind()
        return None

    def valid(self, answer: JSON) -> bool:
        """A non-empty text with balanced braces."""
        return isinstance(answer, str) and len(answer) <= MAX_BOX and not is_echo(answer) and not unclosed(answer)

    def same(self, a: JSON, b: JSON) -> bool:
        """Equal texts after normalisation, or with `equality: math` expressions of the same value."""
        if not isinstance(a, str) or not isinstance(b, str):
            return False
        first, second = sorted((normal_form(a), normal_form(b)))
        return first == second or (self.equality == "math" and maths.equivalent(first, second))

    def instruction(self) -> str:
        """The sentence for the prompt."""
        return "Put your final answer within \\boxed{}."


def normal_form(answer: str) -> str:
    r"""An answer without spaces and spacing commands, `\dfrac`, leading zeros, a final "."."""
    text = _FRACTION.sub(r"\\frac", _SPACING.sub("", answer)).strip("$").rstrip(".")
    return _LEADING_ZEROS.sub("", text)

"""The content of the first pair of tags: `<final>204</final>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.boxes import is_echo
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

MAX_CONTENT = 65_536
"""Longest content in characters."""

_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")


class _Pair(NamedTuple):
    start: str
    end: str
    starts: re.Pattern[str]
    either: re.Pattern[str]


@dataclass(frozen=True, kw_only=True)
class Tag(Contract):
    """The answer is the text between `<tag>` and `</tag>`, without outer white space.

    Tags are written exactly so: in this case and without attributes. A second start before the end
    begins anew, since the first one may have been a mention ("put it in <final> tags").
    """

    kind: ClassVar[str] = "tag"
    lookback: ClassVar[int] = 80
    looks_ahead: ClassVar[bool] = False

    tag: str

    def __post_init__(self) -> None:
        """Refuse what is no name."""
        super().__post_init__()
        if not _NAME.fullmatch(self.tag):
            raise ValueError(f'tag {self.tag!r} must be a name like "final", without < and >')

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        return cls(tag=fields.string("tag"), **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The name."""
        return {"tag": self.tag}

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until a pair of tags closes that is not a blank to fill in."""
        pair = _pair(self.tag)
        while (yield from source.find(pair.starts)):
            content = yield from _content(source, pair)
            if content is not None and not is_echo(content):
                return Commit(content.strip(), source.offset)
        return None

    def valid(self, answer: JSON) -> bool:
        """A text that is not blank and holds neither tag."""
        if not isinstance(answer, str) or len(answer) > MAX_CONTENT or is_echo(answer):
            return False
        return _pair(self.tag).start not in answer and _pair(self.tag).end not in answer

    def same(self, a: JSON, b: JSON) -> bool:
        """Equal texts; runs of white space count as one space."""
        return isinstance(a, str) and isinstance(b, str) and a.split() == b.split()

    def instruction(self) -> str:
        """The sentence for the prompt."""
        return f"Put your final answer between <{self.tag}> and </{self.tag}>."


def _content(source: Source, pair: _Pair) -> Step[str | None]:
    """Read from behind a start to behind the next end; None if there is none within the cap."""
    while True:
        source.mark()
        if not (yield from source.find(pair.either, source.offset + MAX_CONTENT + len(pair.end))):
            source.unmark()
            return None
        if source.before(len(pair.end)) == pair.end:
            content = source.marked()[: -len(pair.end)]
            source.unmark()
            return content


@lru_cache(maxsize=256)
def _pair(tag: str) -> _Pair:
    start, end = f"<{tag}>", f"</{tag}>"
    starts = f"(?<={re.escape(start)})"
    # Found by the last character, so that a tag may be cut anywhere.
    return _Pair(start, end, re.compile(f">{starts}"), re.compile(f">(?:{starts}|(?<={re.escape(end)}))"))

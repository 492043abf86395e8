"""The first match of a user's pattern in a line, on a linear-time engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import re2

from ace_learn.contracts.base import Contract, common_fields, quoted
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.lines import MAX_LINE, read_line
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

MAX_PATTERN = 4096
"""Longest pattern in characters."""

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Regex(Contract):
    """The answer is what a pattern, or one of its groups, matches first in a line.

    The syntax is that of RE2: no look-around and no back-references, hence linear time. Each line is searched by
    itself, without its line break, and settles when it is complete, since what follows in it can change the match.
    """

    kind: ClassVar[str] = "regex"

    pattern: str
    group: int = 0
    """Number of the group that is the answer; 0 is the whole match."""

    def __post_init__(self) -> None:
        """Refuse a pattern that does not compile, matches the empty text, or lacks the group."""
        super().__post_init__()
        if len(self.pattern) > MAX_PATTERN:
            raise ValueError(f"the pattern has {len(self.pattern)} characters; at most {MAX_PATTERN} are allowed")
        pattern = _compiled(self.pattern)
        if not 0 <= self.group <= pattern.groups:
            raise ValueError(f"group {self.group} is none of the pattern's groups 0..{pattern.groups}")
        if pattern.fullmatch("") is not None:
            raise ValueError(f"the pattern {quoted(self.pattern)} matches the empty text; require at least a character")

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        pattern, group = fields.string("pattern"), fields.integer("group")
        return cls(pattern=pattern, group=group or 0, **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The pattern and the group."""
        return {"pattern": self.pattern} | ({"group": self.group} if self.group else {})

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read line by line until one matches."""
        while (line := (yield from read_line(source))) != "":
            text = "" if line is None else line.removesuffix("\n")
            found = self._search(text)
            if line is not None and found is not None:
                start = source.offset - len(line)
                # A pattern that looks at the end of the line may match otherwise where the text is cut.
                kept = found.end if self._search(text[: found.end]) == found else len(text)
                return Commit(found.answer, start + kept)
        return None

    def _search(self, text: str) -> Commit | None:
        """The answer in a line, and where it ends there."""
        match = _compiled(self.pattern).search(_SURROGATES.sub("\ufffd", text))
        answer = "" if match is None else match[self.group]
        return Commit(answer, match.end(self.group)) if match is not None and answer and self.valid(answer) else None

    def valid(self, answer: JSON) -> bool:
        """A text that the whole pattern matches; for a group, one that is not empty and of one line."""
        if not isinstance(answer, str) or not answer or len(answer) > MAX_LINE or "\n" in answer:
            return False
        clean = _SURROGATES.search(answer) is None
        return clean and (self.group > 0 or _compiled(self.pattern).fullmatch(answer) is not None)

    def same(self, a: JSON, b: JSON) -> bool:
        """Equal texts."""
        return isinstance(a, str) and a == b

    def instruction(self) -> str:
        """The sentence for the prompt."""
        return f"Put your final answer on one line that matches the regular expression {self.pattern}"


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False  # the error is raised; it need not be printed as well
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ValueError(
            f"the pattern {quoted(pattern)} is none of RE2's ({error.args[0]!r}); it knows no look-around and no "
            "back-references"
        ) from error

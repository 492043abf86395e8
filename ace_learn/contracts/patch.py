"""A unified diff: the first fenced one, or the first that stands bare in the text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.lines import read_line
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

MAX_PATCH = 1 << 20
"""Longest patch in characters."""
MAX_HEADER = 1024
"""Longest header line: unidiff reads them with patterns that are quadratic in their length."""

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([\w+.-]*)[ \t\r]*\n?")
_INFO = ("", "diff", "patch", "udiff")
_HUNK = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_STARTS = ("diff --git ", "--- ")
_HEADERS = (
    *_STARTS, "+++ ", "index ", "new file mode ", "deleted file mode ", "old mode ", "new mode ", "similarity index ",
    "dissimilarity index ", "rename from ", "rename to ", "copy from ", "copy to ",
)  # fmt: skip


class _Found(NamedTuple):
    text: str
    """The patch; "" if there is none."""
    end: int
    line: str | None
    """The line behind it, which has been read."""


class _Hunk(NamedTuple):
    lines: list[str]
    complete: bool
    end: int
    line: str | None


@dataclass(frozen=True, kw_only=True)
class Patch(Contract):
    """The answer is a unified diff that parses, with at least one hunk; it ends with a line break.

    A fenced block counts if it is marked `diff`, `patch` or not at all; one that holds no patch is passed over. A bare
    patch begins with a file header and ends where no hunk goes on.
    """

    kind: ClassVar[str] = "patch"

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        return cls(**common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """None."""
        return {}

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read line by line until a patch is complete."""
        line = yield from read_line(source)
        while line != "":
            fence = None if line is None else _FENCE.fullmatch(line)
            source.hold = source.offset - len(line or "")
            if fence is not None:
                found = yield from _fenced(source, fence[1], keep=fence[2].lower() in _INFO)
            elif line is not None and line.startswith(_STARTS):
                found = yield from _bare(source, line)
            else:
                source.hold = None
                line = yield from read_line(source)
                continue
            if self.valid(found.text):
                return Commit(found.text, found.end)
            source.hold, line = None, found.line
        return None

    def valid(self, answer: JSON) -> bool:
        """A text that unidiff parses, with a hunk and a line break at its end."""
        return isinstance(answer, str) and answer.endswith("\n") and _changes(answer) is not None

    def same(self, a: JSON, b: JSON) -> bool:
        """The same lines removed and added at the same places, with whatever context."""
        if not isinstance(a, str) or not isinstance(b, str):
            return False
        changes = _changes(a)
        return changes is not None and changes == _changes(b)

    def instruction(self) -> str:
        """The sentence for the prompt."""
        return "Give the change as one unified diff in a ```diff block."


def _fenced(source: Source, fence: str, *, keep: bool) -> Step[_Found]:
    """Read from behind an opening fence to behind the closing one."""
    lines: list[str] = []
    size = 0
    while True:
        line = yield from read_line(source)
        if line == "":
            return _Found("", 0, "")
        if line is None:
            keep = False
            continue
        closing = _FENCE.fullmatch(line)
        if closing is not None and closing[1].startswith(fence) and not closing[2]:
            end = source.offset - len(line) + len(closing[1])
            return _Found("".join(lines) if keep else "", end, (yield from read_line(source)))
        size += len(line)
        keep = keep and size <= MAX_PATCH
        if keep:
            lines.append(line)


def _bare(source: Source, line: str | None) -> Step[_Found]:
    """Read files and hunks as long as they go on."""
    text: list[str] = []
    header: list[str] = []
    size = end = 0
    while line and size <= MAX_PATCH:
        size += len(line)
        counts = _HUNK.match(line)
        if counts is not None and (text or header):
            hunk = yield from _hunk(source, *(int(count or 1) for count in counts.groups()))
            if hunk.complete:
                text += [*header, line, *hunk.lines]
                size += sum(map(len, hunk.lines))
                end, header = hunk.end, []
            line = hunk.line
            if not hunk.complete:
                break
        elif line.startswith("\\ ") and text and not header:
            text.append(line)
            end = source.offset - line.endswith("\n")
            line = yield from read_line(source)
        elif line.startswith(_HEADERS):
            header.append(line)
            line = yield from read_line(source)
        else:
            break
    joined = "".join(text)
    return _Found(joined if joined.endswith("\n") or not joined else f"{joined}\n", end, line)


def _hunk(source: Source, removed: int, added: int) -> Step[_Hunk]:
    """Read the lines that a hunk's header announces."""
    lines: list[str] = []
    size, end = 0, source.offset
    while removed > 0 or added > 0:
        line = yield from read_line(source)
        kind = "" if not line else line[0]
        removed -= kind in ("-", " ", "\n", "\r")
        added -= kind in ("+", " ", "\n", "\r")
        size += len(line or "")
        if not kind or kind not in "+- \n\r\\" or removed < 0 or added < 0 or size > MAX_PATCH:
            return _Hunk(lines, False, 0, line)
        assert line is not None, "a line with a kind"
        lines.append(line)
        # A line break closes the last line without being part of it, unless the line is nothing else.
        end = source.offset - (line.endswith("\n") and line != "\n")
    return _Hunk(lines, True, end, (yield from read_line(source)))


def _changes(patch: str) -> Counter[tuple[str, str, int | None, str]] | None:
    """File, sign, line number and text of each change; None if the text is no patch."""
    if len(patch) > MAX_PATCH:
        return None
    lines = [f"{line}\n" for line in patch.removesuffix("\n").split("\n")]
    for line in lines:
        if (line.startswith("@@") and not _HUNK.match(line)) or (line.startswith(_HEADERS) and len(line) > MAX_HEADER):
            return None
    try:
        files = PatchSet(lines)
    except UnidiffParseError:
        return None
    if not any(len(file) for file in files):
        return None
    return Counter(
        (file.path, line.line_type, line.source_line_no if line.is_removed else line.target_line_no, line.value)
        for file in files
        for hunk in file
        for line in hunk
        if line.is_added or line.is_removed
    )

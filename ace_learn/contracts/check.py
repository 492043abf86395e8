"""Running a file of contract cases.

A case is one JSON object per line: `id`, `contract` (a spec), `text`, `truncated`, and what must
come out: `answer` and `commit_end`, both null if nothing commits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ace_learn.contracts.base import Contract, json_equal
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.kinds import KINDS
from ace_learn.json_type import JSON

CHUNK_SIZES = (1, 2, 3, 7)


class Case(NamedTuple):
    """One text with the right answer."""

    id: str
    contract: dict[str, JSON]
    text: str
    truncated: bool
    expected: Commit | None
    starts_in_think: bool


class Failure(NamedTuple):
    """One case that came out wrong."""

    id: str
    expected: Commit | None
    got: Commit | None
    chunk: int
    """Characters per chunk; 0 is the whole text at once."""

    def __str__(self) -> str:
        """One line: id, expected, got."""
        chunk = f" in chunks of {self.chunk}" if self.chunk else ""
        return f"{self.id}{chunk}: expected {_shown(self.expected)}, got {_shown(self.got)}"


class UnknownKind(NamedTuple):
    """One case of a kind that does not exist, so that nothing is known about it."""

    id: str
    kind: str

    def __str__(self) -> str:
        """One line: id, kind."""
        return f"{self.id}: not checked, unknown contract kind {self.kind!r}"


def load_cases(path: Path | str) -> list[Case]:
    """Read a file of cases.

    Raises:
        ValueError: A line is no case; names the line.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [_case(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def check_file(path: Path | str) -> list[Failure | UnknownKind]:
    """Run a file of cases, whole and in chunks, and return what came out wrong or could not be run.

    Raises:
        ValueError: A line is no case, or its contract is none of a known kind; names the line or the case.
    """
    return [failure for case in load_cases(path) for failure in check_case(case)]


def check_case(case: Case) -> Iterator[Failure | UnknownKind]:
    """The first wrong outcome of a case, if any; a kind that does not exist is one."""
    kind = case.contract.get("kind")
    if isinstance(kind, str) and kind not in KINDS:
        yield UnknownKind(case.id, kind)
        return
    try:
        contract = Contract.from_spec(case.contract)
    except ValueError as error:
        raise ValueError(f"case {case.id!r}: {error}") from error
    for chunk in (0, *CHUNK_SIZES):
        committer = contract.committer(starts_in_think=case.starts_in_think)
        for at in range(0, len(case.text), chunk or max(len(case.text), 1)):
            committer.feed(case.text[at : at + (chunk or len(case.text))])
        got = committer.close(truncated=case.truncated)
        if not _agree(case.expected, got):
            yield Failure(case.id, case.expected, got, chunk)
            return


def _agree(expected: Commit | None, got: Commit | None) -> bool:
    if expected is None or got is None:
        return expected is got
    same_type = type(expected.answer) is type(got.answer)
    return same_type and json_equal(expected.answer, got.answer) and expected.end == got.end


def _case(line: str, where: str) -> Case:
    try:
        raw: JSON = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a case must be a JSON object")
    name, contract, text = raw.get("id"), raw.get("contract"), raw.get("text")
    answer, end = raw.get("answer"), raw.get("commit_end")
    if not isinstance(name, str) or not isinstance(text, str) or not isinstance(contract, dict):
        raise ValueError(f"{where}: a case needs the strings id and text and the object contract")
    if (end is not None and not isinstance(end, int)) or (answer is None) != (end is None):
        raise ValueError(f"{where}: commit_end must be an integer, or null together with answer")
    return Case(
        id=name,
        contract=contract,
        text=text,
        truncated=raw.get("truncated") is True,
        expected=None if end is None else Commit(answer, end),
        starts_in_think=raw.get("starts_in_think") is True,
    )


def _shown(commit: Commit | None) -> str:
    if commit is None:
        return "null"
    return f"{json.dumps(commit.answer, ensure_ascii=False)} at {commit.end}"

"""One labelled trace, and its parquet schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value

from ace_learn.contracts import JSON
from ace_learn.features import broken_shard


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """A problem, its full trace, and the answers at each paragraph end. Answers are JSON text; None: no answer."""

    problem: int
    family: str
    split: str
    prompt: str
    contract: str
    gold: str | None
    excluded: bool
    """The trace was cut before its think end, or never thought: it has no labels."""
    prompt_ids: list[int]
    token_ids: list[int]
    """All output tokens of the full trace."""
    think_start: int
    """Index into `token_ids` of the first think token; -1 if thinking never began."""
    think_end: int
    """Index of the first token of the think end; -1 if thinking never ended."""
    full_answer: str | None
    full_correct: bool
    full_tokens: int
    no_think_answer: str | None
    no_think_correct: bool
    no_think_tokens: int
    no_think_token_ids: list[int]
    boundary: list[int]
    """Token index, from the think start, of each token that closes a paragraph."""
    probe_answer: list[str | None]
    """None also where nobody asked (`probe_asked`)."""
    probe_matches: list[bool | None]
    """Whether the answer is the full one; concluded where nobody asked, None where nobody knows."""
    probe_correct: list[bool | None]
    """None where nobody asked."""
    probe_tokens: list[int | None]
    """Output tokens of the run that exits at the boundary: think, think end and answer. None where nobody asked."""
    probe_token_ids: list[list[int] | None]
    """Answer tokens behind the think end. None where nobody asked."""
    boundary_confidence: list[float]
    first: int
    stable: int
    """-1: not known, since the boundaries behind `first` were not probed."""
    probe_asked: list[bool]
    """The boundary was probed, or is the natural end, whose answer is known for nothing."""
    probe_match_rate: list[float | None]
    """Share of the probes there that match, the target of `consistency`; like `probe_matches` where nobody asked."""

    @property
    def minimal_tokens(self) -> int:
        """Tokens of the least thinking that keeps the answer (`first`)."""
        if self.first < len(self.boundary):
            return self.boundary[self.first] + 1
        return self.think_end - self.think_start

    @property
    def ends_naturally(self) -> list[bool]:
        """Which boundaries stand right before the think end, so that an exit there is the natural end."""
        return [self.think_start + position + 1 == self.think_end for position in self.boundary]


FEATURES = Features(
    {
        "problem": Value("int64"),
        **{name: Value("string") for name in ("family", "split", "prompt", "contract", "gold")},
        "excluded": Value("bool"),
        "prompt_ids": List(Value("int32")),
        "token_ids": List(Value("int32")),
        "think_start": Value("int32"),
        "think_end": Value("int32"),
        "full_answer": Value("string"),
        "full_correct": Value("bool"),
        "full_tokens": Value("int32"),
        "no_think_answer": Value("string"),
        "no_think_correct": Value("bool"),
        "no_think_tokens": Value("int32"),
        "no_think_token_ids": List(Value("int32")),
        "boundary": List(Value("int32")),
        "probe_answer": List(Value("string")),
        "probe_matches": List(Value("bool")),
        "probe_correct": List(Value("bool")),
        "probe_tokens": List(Value("int32")),
        "probe_token_ids": List(List(Value("int32"))),
        "boundary_confidence": List(Value("float32")),
        "first": Value("int32"),
        "stable": Value("int32"),
        "probe_asked": List(Value("bool")),
        "probe_match_rate": List(Value("float32")),
    }
)


def write_records(path: Path, records: Sequence[TraceRecord]) -> None:
    """Writes records as one parquet file."""
    columns = {field.name: [getattr(record, field.name) for record in records] for field in fields(TraceRecord)}
    pq.write_table(Dataset.from_dict(columns, features=FEATURES).data.table, path)


def read_records(path: Path) -> list[TraceRecord]:
    """Reads what `write_records` wrote.

    Raises:
        ValueError: The file is no parquet file of traces.
    """
    try:
        return [TraceRecord(**row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        raise broken_shard(path, f"the traces cannot be read ({error})") from error


def answer_text(answer: JSON) -> str | None:
    """An answer as stored: canonical JSON, or None where there is none."""
    return None if answer is None else json.dumps(answer, sort_keys=True, ensure_ascii=False)

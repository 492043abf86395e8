"""Stored traces of one split as padded numpy arrays, the input of every replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from ace_learn.artifacts import is_temporary
from ace_learn.features import broken_shard

_INT_LISTS = ("boundary", "probe_tokens")
_BOOL_LISTS = ("probe_matches", "probe_correct")

TRACE_SCHEMA = pa.schema(
    [
        ("problem", pa.int64()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("excluded", pa.bool_()),
        ("gold", pa.string()),
        ("think_start", pa.int32()),
        ("think_end", pa.int32()),
        ("full_answer", pa.string()),
        ("full_correct", pa.bool_()),
        ("full_tokens", pa.int32()),
        ("no_think_answer", pa.string()),
        ("no_think_correct", pa.bool_()),
        ("no_think_tokens", pa.int32()),
        *((name, pa.list_(pa.int32())) for name in _INT_LISTS),
        *((name, pa.list_(pa.bool_())) for name in _BOOL_LISTS),
        ("probe_answer", pa.list_(pa.string())),
        ("boundary_confidence", pa.list_(pa.float32())),
        ("first", pa.int32()),
        ("stable", pa.int32()),
    ]
)
"""The columns of `traces.parquet` that an evaluation reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traces:
    """n traces with up to P boundaries each; exit index `num_boundaries[i]` is trace i's natural end.

    Arrays of P + 1 columns are indexed by the exit index; columns past a trace's natural end repeat the natural end.

    Attributes:
        split: the split that the traces came from.
        excluded: how many problems of the split were left out because their trace was cut before its think end.
        problem: global problem number.
        family: problem family.
        has_gold: whether a gold answer is known; without one nothing counts as correct.
        boundary: token index, from the think start, of the token that closes the paragraph; padded with -1.
        num_boundaries: boundaries of each trace.
        boundary_confidence: geometric-mean token probability of the paragraph the boundary closes; padded with 0.
        tokens_at: all output tokens (think and answer) of the run that exits there.
        think_tokens_at: tokens thought by the run that exits there.
        valid_at: the run commits an answer.
        correct_at: that answer equals gold.
        matches_at: that answer equals the full answer; an absent answer matches nothing.
        first: minimal boundary b* (the natural end where no boundary matches).
        stable: first boundary from which all later ones match.
        no_think_tokens: output tokens of the run without thinking.
        no_think_valid: that run commits an answer.
        no_think_correct: that answer equals gold.
        no_think_matches: its stored answer is literally the full answer (no contract equality is stored for it).
    """

    split: str
    excluded: int
    problem: Int[ndarray, " n"]
    family: tuple[str, ...]
    has_gold: Bool[ndarray, " n"]
    boundary: Int[ndarray, "n P"]
    num_boundaries: Int[ndarray, " n"]
    boundary_confidence: Float[ndarray, "n P"]
    tokens_at: Int[ndarray, "n P+1"]
    think_tokens_at: Int[ndarray, "n P+1"]
    valid_at: Bool[ndarray, "n P+1"]
    correct_at: Bool[ndarray, "n P+1"]
    matches_at: Bool[ndarray, "n P+1"]
    first: Int[ndarray, " n"]
    stable: Int[ndarray, " n"]
    no_think_tokens: Int[ndarray, " n"]
    no_think_valid: Bool[ndarray, " n"]
    no_think_correct: Bool[ndarray, " n"]
    no_think_matches: Bool[ndarray, " n"]

    @property
    def num_problems(self) -> int:
        """Number n of traces."""
        return int(self.problem.shape[0])

    @property
    def num_columns(self) -> int:
        """Number P of boundary columns, padding included."""
        return int(self.boundary.shape[1])

    @property
    def is_boundary(self) -> Bool[ndarray, "n P"]:
        """True where a column is a real boundary, False on padding."""
        return np.asarray(self.boundary >= 0)

    @property
    def full_tokens(self) -> Int[ndarray, " n"]:
        """Output tokens of the full runs."""
        return self.tokens_at[:, -1]

    @property
    def full_correct(self) -> Bool[ndarray, " n"]:
        """Whether the full answers equal gold."""
        return self.correct_at[:, -1]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, object]], *, split: str = "test") -> "Traces":
        """Build traces from rows of the `traces.parquet` schema, one mapping per problem.

        Raises:
            ValueError: no row of the split is left, or boundary lists of one row differ in length.
        """
        return _from_table(pa.Table.from_pylist([dict(row) for row in rows], schema=TRACE_SCHEMA), split)

    def select(self, index: Int[ndarray, " m"]) -> "Traces":
        """Return the traces at `index` (repeats allowed), in that order."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: value[index] for name, value in chosen.items() if isinstance(value, ndarray)}
        return Traces(
            split=self.split,
            excluded=self.excluded,
            family=tuple(self.family[i] for i in index.tolist()),
            **arrays,
        )


def load_traces(dataset_folder: Path, split: str) -> Traces:
    """Read one split of a built data set; excluded problems are left out and counted.

    Args:
        dataset_folder: folder written by `python -m ace_learn.build`.
        split: name of the split.

    Raises:
        ValueError: the folder holds no trace shards, a shard lacks columns, or the split is empty.
    """
    paths = sorted(path for path in dataset_folder.glob("shards/*/traces.parquet") if not is_temporary(path.parent))
    if not paths:
        raise ValueError(f"{dataset_folder} holds no shards/*/traces.parquet: run `python -m ace_learn.build` first")
    return _from_table(pa.concat_tables([_read_shard(path, split) for path in paths]), split)


def _read_shard(path: Path, split: str) -> pa.Table:
    """Read the evaluation columns of one shard's rows of the split."""
    try:
        table = pq.read_table(path, columns=TRACE_SCHEMA.names, filters=[("split", "=", split)])
        return table.select(TRACE_SCHEMA.names).cast(TRACE_SCHEMA)
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        raise broken_shard(path, f"the traces cannot be read ({error})") from error


def _from_table(table: pa.Table, split: str) -> Traces:
    table = table.filter(pc.equal(table["split"], split))
    kept = table.filter(pc.invert(table["excluded"])).combine_chunks().sort_by("problem")
    if kept.num_rows == 0:
        raise ValueError(
            f"split {split!r} holds no usable trace ({table.num_rows} excluded): build more problems, "
            "or raise the token limit of the traces"
        )
    counts = _lengths(kept, "boundary")
    for name in (*_INT_LISTS, *_BOOL_LISTS, "probe_answer", "boundary_confidence"):
        if not np.array_equal(_lengths(kept, name), counts):
            raise ValueError(
                f"column {name!r} and column 'boundary' differ in length: delete the shard and build again"
            )
    if pc.list_flatten(kept["probe_tokens"]).null_count > 0:
        raise ValueError(
            f"split {split!r} was not probed at every boundary (probing.strategy of its recipe), so that it cannot be "
            "replayed; name another split, or build it with the strategy `all`"
        )
    width = int(counts.max())
    boundary = _pad(_flat(kept, "boundary"), counts, width, np.int64(-1))
    think = _ints(kept, "think_end") - _ints(kept, "think_start")
    valid = _valid(kept["full_answer"])
    probe_valid = _valid(pc.list_flatten(kept["probe_answer"]))
    return Traces(
        split=split,
        excluded=table.num_rows - kept.num_rows,
        problem=_ints(kept, "problem"),
        family=tuple(kept["family"].to_pylist()),
        has_gold=_valid(kept["gold"]),
        boundary=boundary,
        num_boundaries=counts,
        boundary_confidence=_pad(_flat(kept, "boundary_confidence").astype(np.float64), counts, width, np.float64(0)),
        tokens_at=_with_end(_flat(kept, "probe_tokens"), counts, _ints(kept, "full_tokens")),
        think_tokens_at=_with_end(_flat(kept, "boundary") + 1, counts, think),
        valid_at=_with_end(probe_valid, counts, valid),
        correct_at=_with_end(_flat(kept, "probe_correct"), counts, _bools(kept, "full_correct")),
        matches_at=_with_end(_flat(kept, "probe_matches"), counts, valid),
        first=_ints(kept, "first"),
        stable=_ints(kept, "stable"),
        no_think_tokens=_ints(kept, "no_think_tokens"),
        no_think_valid=_valid(kept["no_think_answer"]),
        no_think_correct=_bools(kept, "no_think_correct"),
        no_think_matches=_equal(kept["no_think_answer"], kept["full_answer"]),
    )


def _ints(table: pa.Table, name: str) -> Int[ndarray, " n"]:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def _bools(table: pa.Table, name: str) -> Bool[ndarray, " n"]:
    return np.asarray(table[name].to_numpy(), dtype=np.bool_)


def _valid(column: pa.ChunkedArray) -> Bool[ndarray, " n"]:
    return np.asarray(pc.is_valid(column).to_numpy(), dtype=np.bool_)


def _equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> Bool[ndarray, " n"]:
    return np.asarray(pc.fill_null(pc.equal(left, right), False).to_numpy(), dtype=np.bool_)


def _lengths(table: pa.Table, name: str) -> Int[ndarray, " n"]:
    return np.asarray(pc.list_value_length(table[name]).to_numpy(), dtype=np.int64)


def _flat(table: pa.Table, name: str) -> ndarray:
    values = np.asarray(pc.list_flatten(table[name]).to_numpy())
    return values.astype(np.int64) if name in _INT_LISTS else values


def _pad(flat: ndarray, counts: Int[ndarray, " n"], width: int, fill: np.generic) -> ndarray:
    """Lay the concatenated lists out as rows of `width`, the rest filled."""
    out = np.full((counts.shape[0], width), fill, dtype=flat.dtype)
    out[np.arange(width) < counts[:, None]] = flat
    return out


def _with_end(flat: ndarray, counts: Int[ndarray, " n"], end: ndarray) -> ndarray:
    """Pad to one column more than the longest list; everything past a list is its natural end."""
    width = int(counts.max()) + 1
    out = np.repeat(end[:, None], width, axis=1)
    out[np.arange(width) < counts[:, None]] = flat
    return out

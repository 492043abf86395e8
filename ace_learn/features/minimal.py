"""Targets under another minimal boundary than the one that a data set was built with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ace_learn.features.shard import broken_shard
from ace_learn.signals import LEARNED

MinimalChoice: TypeAlias = Literal["built", "first", "stable"]

_COLUMNS = ("problem", "excluded", "boundary", "first", "stable", "think_start", "think_end")


class Way(NamedTuple):
    """How far tokens are on the way to the end of the least thinking."""

    progress: Float32[Tensor, " m"]
    remaining: Float32[Tensor, " m"]


def way_to(minimal_position: Int64[Tensor, " m"] | int, position: Int64[Tensor, " m"]) -> Way:
    """Progress = min(1, (t + 1) / (b* + 1)) and remaining = max(0, b* - t) tokens.

    Args:
        minimal_position: token index of b* from the think start, of each row or of all.
        position: token index t from the think start.
    """
    progress = ((position + 1) / (minimal_position + 1)).clamp_max(1.0)
    return Way(progress, (minimal_position - position).clamp_min(0).float())


class MinimalPositions(NamedTuple):
    """Where the least thinking that keeps the answer ends.

    Attributes:
        problem: numbers of the problems that have labels, ascending.
        position: token index of b* from the think start, of each.
    """

    problem: Int64[Tensor, " n"]
    position: Int64[Tensor, " n"]

    def retarget(
        self,
        targets: Float32[Tensor, "m S"],
        *,
        trace: Int64[Tensor, " m"],
        position: Int64[Tensor, " m"],
    ) -> Float32[Tensor, "m S"]:
        """Targets of rows, with progress and remaining anew; see `way_to`.

        Args:
            targets: as they are stored, columns `LEARNED`; what is undefined there (nan) stays so.
            trace: problem number of each row.
            position: token index t of each row from the think start.
        """
        way = way_to(self.position[torch.searchsorted(self.problem, trace)], position)
        fresh = targets.clone()
        for name in Way._fields:
            fresh[:, LEARNED.index(name)] = getattr(way, name)
        return torch.where(targets.isnan(), targets, fresh)


def read_minimal(traces: list[Path], minimal: Literal["first", "stable"]) -> MinimalPositions:
    """Read from the traces of a data set which boundary is the minimal one.

    Args:
        traces: the shards' traces.parquet.
        minimal: the first boundary whose answer matches, or the first from which all later ones match; the natural end
            where there is none.

    Raises:
        ValueError: a file cannot be read, or the boundary is not known for some of the traces.
    """
    table = pa.concat_tables([_read(path) for path in traces])
    table = table.filter(pc.invert(table["excluded"])).combine_chunks().sort_by("problem")
    values = {
        name: table[name].to_numpy().astype(np.int64) for name in _COLUMNS if name not in ("excluded", "boundary")
    }
    best = values[minimal]
    if (best < 0).any():
        raise ValueError(
            f"the {minimal!r} boundary is not known for {int((best < 0).sum())} traces, since their probes were not "
            "asked at every boundary: build with another probing.strategy, or choose the minimal boundary 'first'"
        )
    counts = pc.list_value_length(table["boundary"]).to_numpy().astype(np.int64)
    ends = np.append(
        pc.list_flatten(table["boundary"]).to_numpy().astype(np.int64), 0
    )  # the last: only to index safely
    start = np.cumsum(counts) - counts
    natural = np.maximum(0, values["think_end"] - values["think_start"] - 1)
    position = np.where(best < counts, ends[np.minimum(start + best, len(ends) - 1)], natural)
    return MinimalPositions(torch.from_numpy(values["problem"]), torch.from_numpy(position))


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, columns=list(_COLUMNS)).select(list(_COLUMNS))
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        raise broken_shard(path, f"the traces cannot be read ({error})") from error

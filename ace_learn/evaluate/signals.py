"""A head's signals at the boundaries of stored traces, smoothed as the exit rule smooths them."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from numpy import ndarray
from torch import Tensor

from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import SmoothOver, smooth
from ace_learn.features import FeatureSpec, Source
from ace_learn.signals import COLUMNS, SIGNALS, sources_of, with_derived

_CHUNK_CELLS = 1 << 23
"""Most cells of a padded [traces, tokens, signals] intermediate held at once."""


@runtime_checkable
class FeatureReader(Protocol):
    """The part of `FeatureStore` that is read here."""

    @property
    def spec(self) -> FeatureSpec:
        """The sources that it holds."""
        ...

    def rows(self, split: str, boundaries_only: bool = False) -> Int64[Tensor, " m"]:
        """Row numbers of a split."""
        ...

    def gather(self, rows: Int64[Tensor, " m"], sources: Sequence[Source]) -> Float32[Tensor, "m F"]:
        """Feature rows."""
        ...

    def trace(self, rows: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Problem number of each row."""
        ...

    def position(self, rows: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Token index of each row from the think start."""
        ...

    def boundary(self, rows: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Boundary index of each row, or -1."""
        ...


class SignalReader(NamedTuple):
    """A head on stored features.

    Attributes:
        store: the features of the data set that the traces came from.
        head: features [m, F] to learned signals [m, 4] in natural units, columns `LEARNED`.
        sources: the feature sources that the head reads.
        batch_rows: rows per call of the head.
    """

    store: FeatureReader
    head: Callable[[Float[Tensor, "m F"]], Float[Tensor, "m L"]]
    sources: tuple[Source, ...]
    batch_rows: int = 16384

    def require(self, names: Iterable[str]) -> None:
        """Makes sure that the data set holds what signals are computed from.

        Args:
            names: the signals that a policy reads.

        Raises:
            ValueError: a derived signal reads a source that the data set lacks; names both.
        """
        for name, sources in sources_of(names).items():
            missing = " and ".join(source for source in sources if source not in self.store.spec.sources)
            if missing:
                raise ValueError(
                    f"the signal {name} is computed from the feature source {missing}, which the data set lacks (it "
                    f"holds {', '.join(self.store.spec.sources)}): build it again with {missing} among "
                    "features.sources, or leave the signal out"
                )

    def signals(self, rows: Int64[Tensor, " m"]) -> Float32[Tensor, "m S"]:
        """Signals of stored rows; derived ones are nan where the data set lacks their sources."""
        out = torch.empty(rows.shape[0], len(SIGNALS))
        with torch.no_grad():
            for start in range(0, rows.shape[0], self.batch_rows):
                part = slice(start, start + self.batch_rows)
                learned = self.head(self.store.gather(rows[part], self.sources))
                out[part] = with_derived(learned, self._columns(rows[part]))
        return out

    def _columns(self, rows: Int64[Tensor, " k"]) -> dict[str, Float32[Tensor, "k _"]]:
        """The stored columns that derived signals may read."""
        held: tuple[Source, ...] = tuple(source for source in self.store.spec.sources if source in COLUMNS)
        return {source: self.store.gather(rows, (source,)) for source in held}


def boundary_signals(reader: SignalReader, traces: Traces) -> Float32[ndarray, "n P S"]:
    """Unsmoothed signals at every boundary, nan on padding.

    Raises:
        ValueError: the features lack a boundary of these traces.
    """
    rows = reader.store.rows(traces.split, boundaries_only=True)
    place = _places(traces, reader.store.trace(rows).numpy())
    column = reader.store.boundary(rows).numpy()
    known = np.logical_and(place >= 0, column < traces.num_boundaries[place])
    out = np.full((*traces.boundary.shape, len(SIGNALS)), np.nan, dtype=np.float32)
    out[place[known], column[known]] = reader.signals(rows[torch.from_numpy(known)]).numpy()
    filled = np.zeros(traces.boundary.shape, dtype=np.bool_)
    filled[place[known], column[known]] = True
    missing = int(np.sum(traces.is_boundary & ~filled))
    if missing:
        raise ValueError(
            f"{missing} boundaries of split {traces.split!r} have no feature row: build the data set again"
        )
    return out


def smoothed_signals(
    reader: SignalReader, traces: Traces, *, ewma: float, smooth_over: SmoothOver
) -> Float32[ndarray, "n P S"]:
    """Signals at every boundary, smoothed over boundaries or over all thought tokens; nan on padding.

    Args:
        reader: head and features.
        traces: n traces of one split.
        ewma: weight of the newest value; 1 switches smoothing off.
        smooth_over: what the moving average runs over.

    Raises:
        ValueError: smoothing over tokens, and the features hold only some of the tokens.
    """
    if smooth_over == "boundaries" or ewma == 1.0:
        return smooth(torch.from_numpy(boundary_signals(reader, traces)), ewma).numpy()
    rows, place, position = _token_rows(reader.store, traces)
    lengths = np.where(traces.num_boundaries > 0, traces.boundary.max(axis=1, initial=-1) + 1, 0)
    out = np.full((*traces.boundary.shape, len(SIGNALS)), np.nan, dtype=np.float32)
    step = max(1, _CHUNK_CELLS // max(1, int(lengths.max()) * len(SIGNALS)))
    for start in range(0, traces.num_problems, step):
        chunk = slice(start, min(start + step, traces.num_problems))
        part = slice(*np.searchsorted(place, [chunk.start, chunk.stop]))
        padded = torch.full((chunk.stop - start, int(lengths[chunk].max()), len(SIGNALS)), torch.nan)
        padded[place[part] - start, position[part]] = reader.signals(rows[part])
        over_tokens = smooth(padded, ewma).numpy()
        real = traces.is_boundary[chunk]
        trace, column = np.nonzero(real)
        out[start + trace, column] = over_tokens[trace, traces.boundary[chunk][real]]
    return out


def _token_rows(
    store: FeatureReader, traces: Traces
) -> tuple[Int64[Tensor, " m"], Int[ndarray, " m"], Int[ndarray, " m"]]:
    """Rows of all tokens up to each trace's last boundary, sorted by trace and position."""
    rows = store.rows(traces.split)
    place, position = _places(traces, store.trace(rows).numpy()), store.position(rows).numpy()
    last = traces.boundary.max(axis=1, initial=-1)
    known = np.logical_and(place >= 0, position <= last[place])
    order = np.flatnonzero(known)[np.lexsort((position[known], place[known]))]
    rows, place, position = rows[torch.from_numpy(order)], place[order], position[order]
    expected = np.where(traces.num_boundaries > 0, last + 1, 0)
    if not _complete(place, position, expected):
        raise ValueError(
            "smoothing over tokens needs a feature row for every thought token, and this data set keeps only some: "
            "smooth over boundaries, or build with all token rows"
        )
    return rows, place, position


def _complete(place: Int[ndarray, " m"], position: Int[ndarray, " m"], expected: Int[ndarray, " n"]) -> bool:
    """Whether the sorted rows are exactly the positions 0..expected-1 of every trace."""
    if place.shape[0] != int(expected.sum()):
        return False
    starts = np.cumsum(expected) - expected
    return bool(np.array_equal(position, np.arange(place.shape[0]) - starts[place]))


def _places(traces: Traces, problem: Int[ndarray, " m"]) -> Int[ndarray, " m"]:
    """Index of each problem number among the traces, -1 where it is none of them (excluded or not selected)."""
    order = np.argsort(traces.problem)
    ordered = traces.problem[order]
    found = np.minimum(np.searchsorted(ordered, problem), traces.num_problems - 1)
    return np.asarray(np.where(ordered[found] == problem, order[found], -1))

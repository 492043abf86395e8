"""The reader of a data set's features: many shards, one row numbering, nothing loaded but what is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy import ndarray
from torch import Tensor

from ace_learn.artifacts import is_temporary, read_fields, sha256_file
from ace_learn.features.minimal import MinimalChoice, read_minimal
from ace_learn.features.shard import FEATURE_DTYPES, FILE_NAME, SPLITS, Shard, broken_shard
from ace_learn.features.spec import FeatureSpec, Source
from ace_learn.signals import LEARNED

FORMAT = 1

_TRACES = "traces.parquet"


class FeatureStore:
    """The feature rows of a data set folder, memory-mapped.

    Rows are numbered over all shards in the order of the shards' names. Any number of processes may read one store.

    Attributes:
        folder: The data set folder.
        dataset: The fields of its dataset.json.
        spec: All sources that it holds.
        sha256: The hash that dataset.json gives for the data.
        num_rows: N over all shards.
    """

    def __init__(self, folder: Path, *, minimal: MinimalChoice = "built") -> None:
        """Opens a data set and checks every shard's header and size.

        Args:
            folder: The data set folder (it holds dataset.json and shards/*/features.safetensors).
            minimal: Which boundary progress and remaining lead to; `built`: the one that the data set was built with.

        Raises:
            ValueError: The folder is no data set of this version, a shard is missing, or a shard does not fit; the
                message names the shard and what to do.
            OSError: A file cannot be read.
        """
        self.folder = folder
        self.dataset = read_fields(_dataset_json(folder))
        if self.dataset.integer("format") != FORMAT:
            raise ValueError(f"{self.dataset.where} has format {self.dataset.integer('format')}, not {FORMAT}")
        self.spec = FeatureSpec.from_json(self.dataset.get("features"), where=f"{self.dataset.where}: features")
        self.sha256 = self.dataset.text("sha256")
        dtype = self.dataset.text("feature_dtype").removeprefix("torch.")
        if dtype not in FEATURE_DTYPES:
            raise ValueError(f"{self.dataset.where}: feature_dtype is {dtype}, not one of {', '.join(FEATURE_DTYPES)}")
        paths = _shard_files(folder, self.dataset.integer("num_shards"))
        self._shards = [Shard(path, spec=self.spec, dtype=dtype) for path in paths]
        self._starts = np.cumsum([0, *(shard.num_rows for shard in self._shards)])
        self.num_rows = int(self._starts[-1])
        traces = [path.with_name(_TRACES) for path in paths]
        self._minimal = None if minimal == "built" else read_minimal(traces, minimal)

    def rows(self, split: str, boundaries_only: bool = False) -> Int64[Tensor, " n"]:
        """The numbers of a split's rows, ascending.

        Args:
            split: One of `SPLITS`.
            boundaries_only: Leave out the rows that close no paragraph.

        Raises:
            ValueError: There is no such split.
        """
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; the splits are {', '.join(SPLITS)}")
        parts: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        for start, shard in zip(self._starts, self._shards, strict=False):
            wanted = shard.take("split") == SPLITS.index(split)
            if boundaries_only:
                wanted &= shard.take("boundary") >= 0
            parts.append(wanted.nonzero().squeeze(1) + int(start))
        return torch.cat(parts)

    def gather(self, rows: Int64[Tensor, " n"], sources: Sequence[Source]) -> Float32[Tensor, "n F"]:
        """Feature rows, their sources side by side in the order of `SOURCES`.

        Args:
            rows: Row numbers, in any order, repeats allowed.
            sources: Which of the spec's sources; F is `spec.subset(sources).size`.

        Raises:
            ValueError: A source is not in the data set.
        """
        spec = self.spec.subset(sources)
        out = torch.empty(rows.shape[0], spec.size)
        for shard, local, places in self._by_shard(rows):
            blocks = [shard.take(source, local).float() for source in spec.sources]
            out[places] = torch.cat(blocks, dim=1)
        return out

    def targets(self, rows: Int64[Tensor, " n"]) -> Float32[Tensor, "n S"]:
        """The targets of rows, columns `LEARNED`, nan where a target is undefined."""
        stored = self._column("targets", rows)
        if self._minimal is None:
            return stored
        return self._minimal.retarget(stored, trace=self.trace(rows), position=self.position(rows))

    def trace(self, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The problem index of each row's trace."""
        return self._column("trace", rows)

    def position(self, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The 0-based token index of each row, counted from the think start."""
        return self._column("position", rows)

    def boundary(self, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The index of the boundary that each row is, or -1."""
        return self._column("boundary", rows)

    def _column(self, name: str, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        out = torch.empty(count, len(LEARNED)) if name == "targets" else torch.empty(count, dtype=torch.int64)
        for shard, local, places in self._by_shard(rows):
            out[places] = shard.take(name, local)
        return out

    def _by_shard(self, rows: Tensor) -> Iterator[tuple[Shard, Int64[ndarray, " m"], Tensor]]:
        """For each shard that holds some of the rows: the shard, local row numbers ascending, places in `rows`."""
        if rows.numel() == 0:
            return
        ordered, places = torch.sort(rows, stable=True)
        numbers = ordered.numpy()
        if numbers[0] < 0 or numbers[-1] >= self.num_rows:
            raise IndexError(f"row numbers run from 0 to {self.num_rows - 1}; got {numbers[0]} to {numbers[-1]}")
        cuts = np.searchsorted(numbers, self._starts)
        for index, shard in enumerate(self._shards):
            low, high = int(cuts[index]), int(cuts[index + 1])
            if low < high:
                yield shard, numbers[low:high] - self._starts[index], places[low:high]


def shard_folders(dataset: Path) -> list[Path]:
    """The finished shards of a data set folder, in their order.

    Raises:
        ValueError: The folder holds no shards at all.
    """
    parent = dataset / "shards"
    if not parent.is_dir():
        raise ValueError(f"{dataset} holds no shards/: run `python -m ace_learn.build` first, or run it again")
    return sorted(entry for entry in parent.iterdir() if entry.is_dir() and not is_temporary(entry))


def verify_shards(dataset: Path) -> None:
    """Compares every file of every shard with the hash that its shard.json gives; reads all of them once.

    Raises:
        ValueError: A shard is damaged; the message names it and what to do.
        OSError: A file cannot be read.
    """
    for shard in shard_folders(dataset):
        description = shard / "shard.json"
        if not description.is_file():
            raise broken_shard(description, "the file is missing")
        try:
            expected = read_fields(description).fields("sha256")
            hashes = {name: expected.text(name) for name in expected.data}
        except ValueError as error:
            raise broken_shard(description, str(error)) from error
        for name, sha256 in hashes.items():
            if not (shard / name).is_file():
                raise broken_shard(shard / name, "the file is missing")
            if sha256_file(shard / name) != sha256:
                raise broken_shard(shard / name, "the file is damaged: its SHA-256 is not the one in shard.json")


def _dataset_json(folder: Path) -> Path:
    path = folder / "dataset.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a finished data set: it has no dataset.json; run build, or run it again")
    return path


def _shard_files(folder: Path, expected: int) -> list[Path]:
    shards = shard_folders(folder)
    if len(shards) != expected:
        raise ValueError(
            f"{folder / 'shards'} has {len(shards)} shards where dataset.json announces {expected}; "
            "run build again: it makes what is missing"
        )
    return [shard / FILE_NAME for shard in shards]

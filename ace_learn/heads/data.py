"""Feature rows in batches: whole index vectors at a time, from memory where they fit, else from the memory map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float32, Float64, Int64
from lightning.pytorch import LightningDataModule
from torch import Tensor

from ace_learn.features import FeatureStore, Source
from ace_learn.heads.config import RowChoice, Span
from ace_learn.heads.head import REMAINING

#: Rows that are read at once where every row is visited.
CHUNK = 8192


class Batch(NamedTuple):
    """Feature rows and their targets.

    Attributes:
        features: Feature rows.
        targets: Targets in natural units, columns `LEARNED`, nan where undefined.
    """

    features: Float32[Tensor, "n F"]
    targets: Float32[Tensor, "n S"]


class Statistics(NamedTuple):
    """Mean and (population) standard deviation of every feature."""

    mean: Float64[Tensor, " F"]
    std: Float64[Tensor, " F"]


class FeatureTable:
    """Chosen rows of a store, numbered from 0, with constant work in Python per batch."""

    def __init__(
        self, store: FeatureStore, rows: Int64[Tensor, " n"], *, sources: Sequence[Source], memory_limit: int
    ) -> None:
        """Chooses rows.

        Args:
            store: Where they lie.
            rows: Their numbers in the store.
            sources: Which features.
            memory_limit: Bytes up to which the gathered float32 rows are held in memory; above, every batch is
                gathered from the memory map.
        """
        self._store = store
        self._rows = rows
        self._sources = tuple(sources)
        self._targets = store.targets(rows)
        size = rows.shape[0] * store.spec.subset(sources).size * 4
        self._features = store.gather(rows, sources) if size <= memory_limit else None

    def __len__(self) -> int:
        """The number of rows."""
        return self._rows.shape[0]

    @property
    def in_memory(self) -> bool:
        """Whether the features are held in memory."""
        return self._features is not None

    @property
    def targets(self) -> Float32[Tensor, "n S"]:
        """The targets of all rows."""
        return self._targets

    def batch(self, index: Int64[Tensor, " b"]) -> Batch:
        """The rows of an index vector."""
        if self._features is not None:
            return Batch(self._features[index], self._targets[index])
        return Batch(self._store.gather(self._rows[index], self._sources), self._targets[index])

    def chunks(self, size: int = CHUNK) -> Iterator[Batch]:
        """All rows in order, some at a time."""
        for index in torch.arange(len(self)).split(size):
            yield self.batch(index)


class Share(NamedTuple):
    """Which part of every batch a process takes.

    Attributes:
        rank: The number of the process.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    def of(self, index: Int64[Tensor, " n"]) -> Int64[Tensor, " m"]:
        """This process' part; the parts of all processes make up the whole, and differ by one row at most."""
        return index.tensor_split(self.size)[self.rank]


WHOLE = Share()


class BatchLoader:
    """What Lightning iterates over: whole batches of a table in a given order.

    Every process makes the same number of steps; in a last batch of few rows, its part may be empty.
    """

    def __init__(
        self, table: FeatureTable, order: Int64[Tensor, " n"], *, batch_size: int, share: Share = WHOLE
    ) -> None:
        """Batches a table; the last batch may be smaller.

        Args:
            table: The rows.
            order: In which they come.
            batch_size: Rows of a batch, over all processes.
            share: This process' part of every batch.
        """
        self._table = table
        self._order = order
        self._batch_size = batch_size
        self._share = share

    def __len__(self) -> int:
        """The number of batches."""
        return -(-self._order.shape[0] // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """One pass."""
        for index in self._order.split(self._batch_size):
            yield self._table.batch(self._share.of(index))


class FeatureData(LightningDataModule):
    """Train and validation rows of a store; the split is by problem, as the store's split column says."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        sources: Sequence[Source],
        rows: RowChoice,
        batch_size: int,
        seed: int,
        memory_limit: int,
        span: Span = "whole",
    ) -> None:
        """Chooses the rows; nothing is read before they are used.

        Args:
            store: The data set.
            sources: Which features.
            rows: Every row, or those that close a paragraph.
            batch_size: Rows of a training step, over all processes.
            seed: Of the order of rows.
            memory_limit: Bytes up to which a split's features are held in memory.
            span: The train rows of whole traces, or of their minimal prefixes; the validation rows are of whole ones.

        Raises:
            ValueError: A split has no such rows.
        """
        super().__init__()
        self._batch_size = batch_size
        self._seed = seed
        train, validation = (_split_rows(store, split, rows) for split in ("train", "validation"))
        if span == "minimal_prefix":
            train = _minimal_prefix(store, train)
        self.train_table, self.validation_table = (
            FeatureTable(store, numbers, sources=sources, memory_limit=memory_limit) for numbers in (train, validation)
        )

    def train_dataloader(self) -> BatchLoader:
        """Shuffled batches of the train split; Lightning asks for them at every epoch.

        The order is a function of seed and epoch alone, so that a resumed run goes on as it would have. Of several
        processes, each gives its own part of every batch: no row is left out, and none comes twice.
        """
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        order = epoch_order(len(self.train_table), seed=self._seed, epoch=epoch)
        return BatchLoader(self.train_table, order, batch_size=self._batch_size, share=self._share)

    def val_dataloader(self) -> BatchLoader:
        """Large batches of the validation split, in order, or this process' part of them."""
        order = torch.arange(len(self.validation_table))
        return BatchLoader(self.validation_table, order, batch_size=CHUNK, share=self._share)

    @property
    def _share(self) -> Share:
        return WHOLE if self.trainer is None else Share(self.trainer.global_rank, self.trainer.world_size)


def epoch_order(count: int, *, seed: int, epoch: int) -> Int64[Tensor, " n"]:
    """A permutation of `count` rows for an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def feature_statistics(batches: Iterable[Batch]) -> Statistics:
    """Mean and standard deviation of every feature in one pass, in float64, batches merged by Chan's formula.

    Args:
        batches: Feature rows, at least one.
    """
    count = 0
    mean = squares = torch.zeros(0, dtype=torch.float64)
    for batch in batches:
        rows = batch.features.double()
        new_mean = rows.mean(0)
        new_squares = (rows - new_mean).square().sum(0)
        if count == 0:
            count, mean, squares = rows.shape[0], new_mean, new_squares
            continue
        total = count + rows.shape[0]
        shift = new_mean - mean
        squares = squares + new_squares + shift.square() * (count * rows.shape[0] / total)
        mean = mean + shift * (rows.shape[0] / total)
        count = total
    assert count > 0, "statistics of no rows"
    return Statistics(mean, (squares / count).sqrt())


def _split_rows(store: FeatureStore, split: str, rows: RowChoice) -> Int64[Tensor, " n"]:
    numbers = store.rows(split, boundaries_only=rows == "boundaries")
    if numbers.numel() == 0:
        raise ValueError(
            f"the {split} split of {store.folder} has no rows ({rows}); build the data set with more {split} problems"
        )
    return numbers


def _minimal_prefix(store: FeatureStore, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " m"]:
    """Those of the train rows that stand at or before the minimal boundary of their trace.

    `remaining` is positive before it, and 0 from it on: it is the first token of its trace with 0. Rows whose
    `remaining` is undefined are left out.
    """
    every = store.rows("train")
    done = every[store.targets(every)[:, REMAINING] == 0]
    end = torch.full((int(store.trace(every).max()) + 1,), torch.iinfo(torch.int64).max)
    end = end.scatter_reduce(0, store.trace(done), store.position(done), "amin")
    remaining = store.targets(rows)[:, REMAINING]
    kept = rows[(remaining > 0) | ((remaining == 0) & (store.position(rows) == end[store.trace(rows)]))]
    if kept.numel() == 0:
        raise ValueError(
            f"no train row of {store.folder} stands in a minimal prefix (`remaining` is undefined); choose span: whole"
        )
    return kept

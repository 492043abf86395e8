"""Traces in batches: token ids and the signals' targets, as a data set holds them; states are made on the fly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float32, Int64
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ace_learn.features import FeatureStore, broken_shard, shard_folders
from ace_learn.heads.data import epoch_order
from ace_learn.signals import LEARNED

_COLUMNS = ("problem", "split", "prompt_ids", "token_ids", "think_start")
_TRACES = "traces.parquet"

#: Batches of an epoch among which traces are sorted by length, so that little is padded.
WINDOW = 16


class Trace(NamedTuple):
    """One prompt with what the target answered.

    Attributes:
        tokens: Prompt and output.
        prompt_length: How many of them are the prompt, at least one.
        targets: What the signals are to say at each token, columns `LEARNED`, nan where undefined.
    """

    tokens: Int64[Tensor, " T"]
    prompt_length: int
    targets: Float32[Tensor, "T S"]


class Batch(NamedTuple):
    """Traces side by side, padded on the right.

    Attributes:
        tokens: Prompts and outputs; padding is 0.
        lengths: Tokens of each trace.
        prompt_lengths: Prompt tokens of each.
        targets: Targets of the signals at each token, nan where undefined and on padding.
    """

    tokens: Int64[Tensor, "B T"]
    lengths: Int64[Tensor, " B"]
    prompt_lengths: Int64[Tensor, " B"]
    targets: Float32[Tensor, "B T S"]


class Traces(NamedTuple):
    """The traces of a split.

    Attributes:
        traces: In the order of the data set.
        cut: How many of them were cut at the longest length.
    """

    traces: list[Trace]
    cut: int


def read_traces(store: FeatureStore, split: str, *, max_tokens: int) -> Traces:
    """Reads the traces of a split, those without labels included: what they say is the target's text all the same.

    Args:
        store: The data set; targets are those of its rows, and nan elsewhere.
        split: One of the data set's splits.
        max_tokens: Longer traces are cut behind that many tokens; those whose prompt is that long are left out.

    Raises:
        ValueError: A shard cannot be read, or the split has no traces.
    """
    labels = _labels(store, split)
    nothing = _Labels(torch.empty(0, dtype=torch.int64), torch.empty(0, len(LEARNED)))
    traces: list[Trace] = []
    cut = 0
    for problem, prompt, output, think_start in _rows(store, split):
        if len(prompt) >= max_tokens - 1 or not output:
            cut += 1
            continue
        tokens = torch.tensor([*prompt, *output])
        known = labels.get(problem, nothing)
        targets = torch.full((len(tokens), len(LEARNED)), torch.nan)
        targets[len(prompt) + think_start + known.position] = known.targets
        cut += len(tokens) > max_tokens
        traces.append(Trace(tokens[:max_tokens], len(prompt), targets[:max_tokens]))
    if not traces:
        raise ValueError(
            f"the {split} split of {store.folder} has no traces with prompts below {max_tokens} tokens; build the "
            f"data set with {split} problems, or raise max_tokens"
        )
    return Traces(traces, cut)


def collate(traces: Sequence[Trace]) -> Batch:
    """Pads traces to the longest."""
    return Batch(
        pad_sequence([trace.tokens for trace in traces], batch_first=True),
        torch.tensor([len(trace.tokens) for trace in traces]),
        torch.tensor([trace.prompt_length for trace in traces]),
        pad_sequence([trace.targets for trace in traces], batch_first=True, padding_value=torch.nan),
    )


class TraceLoader:
    """What Lightning iterates over: batches of traces in a given order."""

    def __init__(self, traces: Sequence[Trace], batches: Sequence[Int64[Tensor, " _"]]) -> None:
        """Batches traces.

        Args:
            traces: The traces.
            batches: The numbers of each batch's traces.
        """
        self._traces, self._batches = traces, batches

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """One pass."""
        for batch in self._batches:
            yield collate([self._traces[index] for index in batch.tolist()])


class TraceData(LightningDataModule):
    """The traces of the train and validation splits, in batches of about equal length."""

    def __init__(self, train: Sequence[Trace], validation: Sequence[Trace], *, batch_size: int, seed: int) -> None:
        """Takes the traces of both splits.

        Args:
            train: At least one.
            validation: At least one.
            batch_size: Traces of a training step.
            seed: Of the order.
        """
        super().__init__()
        self.train_traces, self.validation_traces = train, validation
        self._batch_size, self._seed = batch_size, seed

    def train_dataloader(self) -> TraceLoader:
        """Batches of an epoch, a function of seed and epoch alone, so that a resumed run goes on as it would have."""
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        order = epoch_order(len(self.train_traces), seed=self._seed, epoch=epoch)
        lengths = torch.tensor([len(trace.tokens) for trace in self.train_traces])
        batches = by_length(order, lengths, batch_size=self._batch_size)
        shuffled = epoch_order(len(batches), seed=self._seed, epoch=epoch)
        return TraceLoader(self.train_traces, [batches[index] for index in shuffled.tolist()])

    def val_dataloader(self) -> TraceLoader:
        """Batches of the validation split, shortest traces first."""
        lengths = torch.tensor([len(trace.tokens) for trace in self.validation_traces])
        return TraceLoader(self.validation_traces, list(lengths.argsort(stable=True).split(self._batch_size)))


def by_length(order: Int64[Tensor, " n"], lengths: Int64[Tensor, " n"], *, batch_size: int) -> list[Tensor]:
    """Batches in which traces are about equally long.

    Args:
        order: A permutation; traces are only moved within `WINDOW` batches of it.
        lengths: Tokens of each trace.
        batch_size: Traces of a batch; the last one may be smaller.
    """
    batches: list[Tensor] = []
    for window in order.split(batch_size * WINDOW):
        batches.extend(window[lengths[window].argsort(stable=True)].split(batch_size))
    return batches


class _Labels(NamedTuple):
    """Labelled tokens of one trace: positions from the think start, and targets there."""

    position: Int64[Tensor, " m"]
    targets: Float32[Tensor, "m S"]


def _labels(store: FeatureStore, split: str) -> dict[int, _Labels]:
    rows = store.rows(split)
    problem, position, targets = store.trace(rows), store.position(rows), store.targets(rows)
    order = problem.argsort(stable=True)
    problems, counts = problem[order].unique_consecutive(return_counts=True)
    parts = zip(position[order].split(counts.tolist()), targets[order].split(counts.tolist()), strict=True)
    return {number: _Labels(*part) for number, part in zip(problems.tolist(), parts, strict=True)}


_Row: TypeAlias = tuple[int, list[int], list[int], int]


def _rows(store: FeatureStore, split: str) -> Iterator[_Row]:
    """Problem, prompt, output and think start of the traces of a split."""
    for shard in shard_folders(store.folder):
        path = shard / _TRACES
        try:
            table = pq.read_table(path, columns=list(_COLUMNS)).to_pylist()
        except (pa.ArrowException, ValueError, KeyError, OSError) as error:
            raise broken_shard(path, f"the traces cannot be read ({error})") from error
        for row in table:
            if row["split"] == split:
                yield row["problem"], row["prompt_ids"], row["token_ids"], row["think_start"]

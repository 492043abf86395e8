"""Rows in batches: the same numbers from memory and from the memory map."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ace_learn.features import DEFAULT_SOURCES, FeatureStore
from ace_learn.heads.baselines import linear_baseline
from ace_learn.heads.config import RowChoice, Span
from ace_learn.heads.data import (
    Batch,
    BatchLoader,
    FeatureData,
    FeatureTable,
    Share,
    epoch_order,
    feature_statistics,
)
from tests.features.synthetic import Synthetic, make_dataset, make_rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("dataset")
    make_dataset(folder, Synthetic(dtype=torch.bfloat16))
    return FeatureStore(folder)


def _tables(store: FeatureStore) -> list[FeatureTable]:
    rows = store.rows("train")
    return [FeatureTable(store, rows, sources=DEFAULT_SOURCES, memory_limit=limit) for limit in (1 << 30, 0)]


def test_memory_and_memory_map_agree(store: FeatureStore) -> None:
    loaded, mapped = _tables(store)
    assert loaded.in_memory
    assert not mapped.in_memory
    index = torch.tensor([5, 0, 5, len(loaded) - 1])
    assert torch.equal(loaded.batch(index).features, mapped.batch(index).features)
    assert torch.equal(loaded.batch(index).targets.nan_to_num(-1), mapped.batch(index).targets.nan_to_num(-1))
    expected = store.gather(store.rows("train")[index], DEFAULT_SOURCES)
    assert torch.equal(mapped.batch(index).features, expected)


def test_chunks_cover_every_row_once_in_order(store: FeatureStore) -> None:
    table = _tables(store)[0]
    chunks = list(table.chunks(100))
    assert [chunk.features.shape[0] for chunk in chunks[:-1]] == [100] * (len(chunks) - 1)
    assert torch.equal(torch.cat([c.features for c in chunks]), table.batch(torch.arange(len(table))).features)


def test_statistics_are_exact_whatever_the_chunks() -> None:
    rows = torch.randn(1000, 3) * torch.tensor([1.0, 1e-3, 50.0]) + torch.tensor([0.0, 1e3, -1e4])
    rows[:, 1] = 7.0
    batches = [Batch(part, torch.zeros(part.shape[0], 4)) for part in rows.split([1, 99, 500, 400])]
    found = feature_statistics(batches)
    np.testing.assert_allclose(found.mean, rows.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, rows.double().numpy().std(0), rtol=1e-9, atol=1e-12)
    assert found.std[1] == 0


def test_data_module_splits_and_choice_of_rows(store: FeatureStore) -> None:
    sizes = {}
    for rows in ("boundaries", "all"):
        data = FeatureData(store, sources=["scalars"], rows=rows, batch_size=32, seed=0, memory_limit=1 << 30)
        sizes[rows] = (len(data.train_table), len(data.validation_table))
        loader = data.train_dataloader()
        batches = list(loader)
        assert len(batches) == len(loader) == -(-sizes[rows][0] // 32)
        seen = torch.cat([batch.features for batch in batches])
        assert not torch.equal(seen, store.gather(store.rows("train", rows == "boundaries"), ["scalars"]))
        assert torch.allclose(
            seen.sum(0), data.train_table.batch(torch.arange(sizes[rows][0])).features.sum(0), atol=1e-3
        )
    assert sizes == {"boundaries": (125, 25), "all": (375, 75)}


def test_epoch_order_is_a_function_of_seed_and_epoch() -> None:
    first = epoch_order(100, seed=1, epoch=0)
    assert torch.equal(first.sort().values, torch.arange(100))
    assert torch.equal(first, epoch_order(100, seed=1, epoch=0))
    assert not torch.equal(first, epoch_order(100, seed=1, epoch=1))
    assert not torch.equal(first, epoch_order(100, seed=2, epoch=0))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parts_of_all_processes_are_the_batches_of_one(store: FeatureStore, size: int) -> None:
    table = _tables(store)[0]
    order = epoch_order(65, seed=0, epoch=0)  # the last batch has one row, fewer than there are processes
    whole = [batch.features for batch in BatchLoader(table, order, batch_size=32)]
    loaders = [BatchLoader(table, order, batch_size=32, share=Share(rank, size)) for rank in range(size)]
    assert {len(loader) for loader in loaders} == {3}
    for expected, *parts in zip(whole, *loaders, strict=True):
        assert torch.equal(torch.cat([part.features for part in parts]), expected)
        assert max(len(part.features) for part in parts) - min(len(part.features) for part in parts) <= 1


def test_the_minimal_prefix_ends_at_the_minimal_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(Synthetic(problems=10, boundaries=4, paragraph=3))
    # trace 0: boundary 1 (token 5); trace 1: the first token; the others: unknown, which is left out
    end = torch.tensor([5, 0]).repeat_interleave(12)
    rows["targets"][:, 2] = math.nan
    rows["targets"][:24, 2] = (end - rows["position"][:24]).clamp(min=0).float()
    monkeypatch.setattr("tests.features.synthetic.make_rows", lambda _: rows)
    make_dataset(tmp_path, Synthetic(problems=10, boundaries=4, paragraph=3))
    store = FeatureStore(tmp_path)

    def train(rows: RowChoice, span: Span) -> torch.Tensor:
        data = FeatureData(store, sources=["scalars"], rows=rows, batch_size=8, seed=0, memory_limit=1 << 30, span=span)
        assert len(data.validation_table) == len(store.rows("validation", rows == "boundaries"))
        return data.train_table.batch(torch.arange(len(data.train_table))).features

    scalars = rows["scalars"]
    assert torch.equal(train("all", "minimal_prefix"), scalars[[0, 1, 2, 3, 4, 5, 12]])
    assert torch.equal(train("boundaries", "minimal_prefix"), scalars[[2, 5]])
    assert torch.equal(train("all", "whole"), scalars[rows["split"] == 0])


def test_a_prefix_of_unknown_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(Synthetic())
    rows["targets"][:, 2] = math.nan
    monkeypatch.setattr("tests.features.synthetic.make_rows", lambda _: rows)
    make_dataset(tmp_path, Synthetic())
    with pytest.raises(ValueError, match=r"no train row of .* stands in a minimal prefix"):
        FeatureData(
            FeatureStore(tmp_path),
            sources=["scalars"],
            rows="all",
            batch_size=8,
            seed=0,
            memory_limit=0,
            span="minimal_prefix",
        )


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, Synthetic(problems=5, shards=1))
    with pytest.raises(ValueError, match=r"validation split of .* has no rows"):
        FeatureData(FeatureStore(tmp_path), sources=["scalars"], rows="all", batch_size=8, seed=0, memory_limit=1 << 30)


def test_linear_baseline_solves_a_linear_problem(tmp_path: Path) -> None:
    make_dataset(tmp_path, Synthetic(problems=200))
    store = FeatureStore(tmp_path)
    train, validation = (
        FeatureTable(store, store.rows(split), sources=["target_last"], memory_limit=1 << 30)
        for split in ("train", "validation")
    )
    metrics = linear_baseline(train, validation, feature_statistics(train.chunks()), seed=0)
    assert metrics.confidence.spearman is not None
    assert metrics.confidence.spearman > 0.99
    assert metrics.remaining_log.r2 is not None
    assert metrics.remaining_log.r2 > 0.95
    assert metrics.consistency.auc is not None
    assert metrics.consistency.auc > 0.99


def test_linear_baseline_without_any_consistency_target(tmp_path: Path) -> None:
    make_dataset(tmp_path, Synthetic())
    store = FeatureStore(tmp_path)
    inside = [store.rows(split)[store.boundary(store.rows(split)) < 0] for split in ("train", "validation")]
    train, validation = (FeatureTable(store, rows, sources=["scalars"], memory_limit=1 << 30) for rows in inside)
    metrics = linear_baseline(train, validation, feature_statistics(train.chunks()), seed=0)
    assert metrics.consistency.rows == 0
    assert metrics.consistency.auc is None

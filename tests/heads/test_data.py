"""Rows in batches: the same numbers from memory and from the memory map."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ace_learn.features import SOURCES, FeatureStore
from ace_learn.heads.baselines import linear_baseline
from ace_learn.heads.data import Batch, FeatureData, FeatureTable, epoch_order, feature_statistics
from tests.features.synthetic import Synthetic, make_dataset


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("dataset")
    make_dataset(folder, Synthetic(dtype=torch.bfloat16))
    return FeatureStore(folder)


def _tables(store: FeatureStore) -> list[FeatureTable]:
    rows = store.rows("train")
    return [FeatureTable(store, rows, sources=SOURCES, memory_limit=limit) for limit in (1 << 30, 0)]


def test_memory_and_memory_map_agree(store: FeatureStore) -> None:
    loaded, mapped = _tables(store)
    assert loaded.in_memory
    assert not mapped.in_memory
    index = torch.tensor([5, 0, 5, len(loaded) - 1])
    assert torch.equal(loaded.batch(index).features, mapped.batch(index).features)
    assert torch.equal(loaded.batch(index).targets.nan_to_num(-1), mapped.batch(index).targets.nan_to_num(-1))
    expected = store.gather(store.rows("train")[index], SOURCES)
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

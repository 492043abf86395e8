"""FeatureStore: what it reads is what was written, and nothing broken is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file

from ace_learn.artifacts import read_json, write_json
from ace_learn.features import DEFAULT_SOURCES, SPLITS, FeatureStore, FeatureWriter, Source, write_features
from tests.features.synthetic import Synthetic, make_dataset, make_rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    make_dataset(folder, Synthetic())
    return folder


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_gather_equals_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = make_dataset(tmp_path, Synthetic(dtype=dtype))
    store = FeatureStore(tmp_path)
    assert store.num_rows == rows["trace"].shape[0] == 600
    everything = torch.cat([rows[source].float() for source in DEFAULT_SOURCES], dim=1)
    assert everything.shape[1] == store.spec.size == 6 + 12 + 7
    picked = torch.tensor([599, 0, 3, 200, 199, 201, 3])
    assert torch.equal(store.gather(picked, DEFAULT_SOURCES), everything[picked])
    assert torch.equal(store.gather(picked, ["scalars"]), rows["scalars"][picked])
    both: tuple[Source, ...] = ("scalars", "target_last")
    assert torch.equal(store.gather(picked, both), everything[picked][:, [*range(6), *range(18, 25)]])
    torch.testing.assert_close(store.targets(picked), rows["targets"][picked], rtol=0, atol=0, equal_nan=True)
    for name in ("trace", "position", "boundary"):
        assert torch.equal(getattr(store, name)(picked), rows[name][picked])


def test_rows_by_split(dataset: Path) -> None:
    rows, store = make_rows(Synthetic()), FeatureStore(dataset)
    seen = torch.cat([store.rows(split) for split in SPLITS])
    assert torch.equal(seen.sort().values, torch.arange(store.num_rows))
    for index, split in enumerate(SPLITS):
        inside = rows["split"] == index
        assert torch.equal(store.rows(split), inside.nonzero()[:, 0])
        assert torch.equal(store.rows(split, boundaries_only=True), (inside & (rows["boundary"] >= 0)).nonzero()[:, 0])
    with pytest.raises(ValueError, match="no split 'tset'; the splits are train"):
        store.rows("tset")


@settings(max_examples=30, deadline=None)
@given(picked=st.lists(st.integers(0, 599), max_size=50))
def test_gather_is_indexing(dataset: Path, picked: list[int]) -> None:
    rows, store = make_rows(Synthetic()), FeatureStore(dataset)
    index = torch.tensor(picked, dtype=torch.int64)
    assert torch.equal(store.gather(index, ["target_last"]), rows["target_last"][index])
    assert torch.equal(store.trace(index), rows["trace"][index])


def test_rows_out_of_range(dataset: Path) -> None:
    with pytest.raises(IndexError, match="from 0 to 599"):
        FeatureStore(dataset).gather(torch.tensor([600]), ["scalars"])


def test_an_empty_shard_and_a_temporary_one_are_fine(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(dataset, folder)
    rows = make_rows(Synthetic())
    write_features(folder / "shards" / "00003", {name: column[:0] for name, column in rows.items()})
    (folder / "shards" / "00004.tmp-1234").mkdir()
    description = read_json(folder / "dataset.json")
    assert isinstance(description, dict)
    write_json(folder / "dataset.json", {**description, "num_shards": 4})
    store = FeatureStore(folder)
    assert store.num_rows == 600
    assert torch.equal(store.gather(torch.tensor([599]), ["scalars"]), rows["scalars"][599:])
    assert store.gather(torch.empty(0, dtype=torch.int64), ["scalars"]).shape == (0, 7)


def _truncate(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-10])


def _truncate_in_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _remove(file: Path) -> None:
    file.unlink()


def _break_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:12] = b"oops"
    file.write_bytes(data)


def _html(file: Path) -> None:
    file.write_text("<html>" + "not found " * 50)


def _other_width(file: Path) -> None:
    columns = load_file(file)
    columns["target_last"] = columns["target_last"][:, :5].contiguous()
    save_file(columns, file, metadata={"format": "ace_learn.features/1"})


def _other_dtype(file: Path) -> None:
    columns = load_file(file)
    columns["target_last"] = columns["target_last"].bfloat16()
    save_file(columns, file, metadata={"format": "ace_learn.features/1"})


def _other_format(file: Path) -> None:
    save_file(load_file(file), file, metadata={"format": "ace_learn.features/0"})


def _other_length(file: Path) -> None:
    columns = load_file(file)
    columns["scalars"] = columns["scalars"][:-1].contiguous()
    save_file(columns, file, metadata={"format": "ace_learn.features/1"})


def _lying_offsets(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["trace"]["data_offsets"][1] += 8
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "bytes where its header announces"),
        (_truncate_in_header, "cut off"),
        (_empty, "cut off"),
        (_remove, "missing"),
        (_break_header, "header cannot be read"),
        (_html, "cut off, or no safetensors file"),
        (_other_width, r"target_last is F32 \[195, 5\], not F32 \[195, 6\]"),
        (_other_dtype, "target_last is BF16"),
        (_other_format, "features/0, not"),
        (_other_length, r"scalars is F32 \[194, 7\]"),
        (_lying_offsets, "size that does not fit its shape"),
    ],
)
def test_a_broken_shard_is_named_with_the_remedy(dataset: Path, tmp_path: Path, damage, message: str) -> None:
    folder = tmp_path / "d"
    shutil.copytree(dataset, folder)
    damage(folder / "shards" / "00001" / "features.safetensors")
    with pytest.raises(ValueError, match=r"shard 00001 is not usable.*Delete the folder .*run build again") as caught:
        FeatureStore(folder)
    caught.match(message)


def test_a_missing_shard_and_a_missing_data_set(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(dataset, folder)
    shutil.rmtree(folder / "shards" / "00002")
    with pytest.raises(ValueError, match=r"has 2 shards where dataset\.json announces 3; run build again"):
        FeatureStore(folder)
    with pytest.raises(ValueError, match=r"no dataset\.json"):
        FeatureStore(tmp_path)


def test_a_data_set_of_another_shape_names_a_shard(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(dataset, folder)
    description = read_json(folder / "dataset.json")
    assert isinstance(description, dict)
    write_json(folder / "dataset.json", {**description, "feature_dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"shard 00000 is not usable.*target_last is F32"):
        FeatureStore(folder)
    write_json(folder / "dataset.json", {**description, "feature_dtype": "int8"})
    with pytest.raises(ValueError, match="feature_dtype is int8"):
        FeatureStore(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop("trace"), "need the columns"),
        (lambda rows: rows.update(extra=rows["trace"]), "need the columns"),
        (lambda rows: rows.update(trace=rows["trace"].int()), "trace must be int64"),
        (lambda rows: rows.update(scalars=rows["scalars"].double()), "scalars must be float32"),
        (lambda rows: rows.update(target_aux=rows["target_aux"].bfloat16()), "share one dtype"),
        (lambda rows: rows.update(targets=rows["targets"][:, :3]), "targets must have 4"),
        (lambda rows: rows.update(targets=rows["targets"][:5]), "must have 2 axes and 600 rows"),
    ],
)
def test_the_writer_refuses_what_the_reader_would(tmp_path: Path, change, message: str) -> None:
    rows = make_rows(Synthetic())
    change(rows)
    with pytest.raises(ValueError, match=message):
        write_features(tmp_path / "shard", rows)
    assert not (tmp_path / "shard").exists()


def test_rows_written_in_pieces_are_the_file_written_at_once(tmp_path: Path) -> None:
    rows = make_rows(Synthetic())
    write_features(tmp_path / "whole", rows)
    (tmp_path / "pieces").mkdir()
    with FeatureWriter(tmp_path / "pieces") as writer:
        for start, stop in ((0, 7), (7, 7), (7, 400), (400, None)):
            writer.append({name: column[start:stop] for name, column in rows.items()})
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == ["features.safetensors"]
    data = (tmp_path / "pieces" / "features.safetensors").read_bytes()
    assert data == (tmp_path / "whole" / "features.safetensors").read_bytes()
    read = load(data)
    assert all(torch.equal(read[name].nan_to_num(), column.nan_to_num()) for name, column in rows.items())


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    rows = make_rows(Synthetic())
    other = {name: column for name, column in rows.items() if name != "target_aux"}

    def write() -> None:
        with FeatureWriter(tmp_path) as writer:
            writer.append(rows)
            writer.append(other)

    with pytest.raises(ValueError, match="are not those of the rows before them"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_gather_reads_only_what_it_needs(tmp_path: Path) -> None:
    """A gather of a few rows out of a 64 MB shard must not make the process hold the shard."""
    rows = make_rows(Synthetic(problems=400, boundaries=10, hidden_size=4, shards=1))
    count = rows["trace"].shape[0]
    wide = Synthetic(hidden_size=1400, aux_layers=(), shards=1)
    write_features(
        tmp_path / "shards" / "00000",
        {**{k: v for k, v in rows.items() if k != "target_aux"}, "target_last": torch.ones(count, wide.hidden_size)},
    )
    make_dataset(tmp_path / "small", Synthetic(problems=8, shards=1))
    description = read_json(tmp_path / "small" / "dataset.json")
    assert isinstance(description, dict)
    spec = {"sources": ["target_last", "scalars"], "hidden_size": wide.hidden_size, "aux_layers": []}
    write_json(tmp_path / "dataset.json", {**description, "features": spec, "num_shards": 1})
    del rows
    store = FeatureStore(tmp_path)
    before = _anonymous_bytes()
    few = store.gather(torch.arange(0, count, 1000), ["target_last"])
    assert few.sum() == few.numel()
    assert _anonymous_bytes() - before < 8 << 20


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")

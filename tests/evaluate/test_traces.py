import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ace_learn.evaluate.traces import TRACE_SCHEMA, Traces, load_traces
from ace_learn.features import verify_shards
from tests.evaluate.synthetic import make_rows
from tests.features.synthetic import describe_shard


def hand_rows():
    """Two traces: three boundaries of which the second is right, and a single boundary that is wrong."""
    first = {
        "problem": 4, "family": "sums", "split": "test", "excluded": False, "gold": "7", "think_start": 2,
        "think_end": 32, "full_answer": "7", "full_correct": True, "full_tokens": 38, "no_think_answer": None,
        "no_think_correct": False, "no_think_tokens": 20, "boundary": [9, 19, 29], "probe_answer": ["3", "7", None],
        "probe_matches": [False, True, False], "probe_correct": [False, True, False], "probe_tokens": [18, 28, 40],
        "boundary_confidence": [0.5, 0.75, 1.0], "first": 1, "stable": 3,
    }  # fmt: skip
    second = first | {
        "problem": 2, "family": "chains", "gold": None, "think_end": 14, "full_answer": "8", "full_correct": False,
        "full_tokens": 20, "no_think_answer": "8", "boundary": [9], "probe_answer": ["5"], "probe_matches": [False],
        "probe_correct": [False], "probe_tokens": [17], "boundary_confidence": [0.25], "first": 1, "stable": 1,
    }  # fmt: skip
    return [first, second]


def test_padding_and_natural_end_by_hand():
    traces = Traces.from_rows(hand_rows())
    assert traces.problem.tolist() == [2, 4]  # in the order of the problems
    assert traces.family == ("chains", "sums")
    assert traces.has_gold.tolist() == [False, True]
    assert traces.num_boundaries.tolist() == [1, 3]
    assert traces.boundary.tolist() == [[9, -1, -1], [9, 19, 29]]
    assert traces.tokens_at.tolist() == [[17, 20, 20, 20], [18, 28, 40, 38]]
    assert traces.think_tokens_at.tolist() == [[10, 12, 12, 12], [10, 20, 30, 30]]
    assert traces.valid_at.tolist() == [[True, True, True, True], [True, True, False, True]]
    assert traces.correct_at.tolist() == [[False] * 4, [False, True, False, True]]
    assert traces.matches_at.tolist() == [[False, True, True, True], [False, True, False, True]]
    assert traces.boundary_confidence.tolist() == [[0.25, 0, 0], [0.5, 0.75, 1.0]]
    assert traces.no_think_valid.tolist() == [True, False]
    assert traces.no_think_matches.tolist() == [True, False]
    assert traces.full_tokens.tolist() == [20, 38]
    assert traces.full_correct.tolist() == [False, True]


def test_null_full_answer_matches_nothing_not_even_itself():
    row = hand_rows()[0] | {"full_answer": None, "full_correct": False, "probe_matches": [False] * 3}
    traces = Traces.from_rows([row])
    assert not traces.matches_at.any()
    assert not traces.valid_at[0, -1]
    assert not traces.no_think_matches.any()  # both answers are absent


def test_excluded_and_other_splits_are_left_out_and_excluded_counted():
    rows = [*hand_rows(), hand_rows()[0] | {"problem": 9, "excluded": True, "think_end": -1, "boundary": []}]
    rows[2] |= {name: [] for name in ("probe_answer", "probe_matches", "probe_correct", "probe_tokens")}
    rows[2]["boundary_confidence"] = []
    rows.append(hand_rows()[0] | {"problem": 10, "split": "train"})
    traces = Traces.from_rows(rows)
    assert traces.problem.tolist() == [2, 4]
    assert traces.excluded == 1


def test_traces_without_any_boundary():
    lists = ("boundary", "probe_answer", "probe_matches", "probe_correct", "probe_tokens", "boundary_confidence")
    row = hand_rows()[0] | {name: [] for name in lists} | {"first": 0, "stable": 0}
    traces = Traces.from_rows([row])
    assert traces.boundary.shape == (1, 0)
    assert traces.tokens_at.tolist() == [[38]]


def test_select_repeats_and_reorders():
    traces = Traces.from_rows(hand_rows()).select(np.array([1, 1, 0]))
    assert traces.problem.tolist() == [4, 4, 2]
    assert traces.family == ("sums", "sums", "chains")
    assert traces.tokens_at.shape == (3, 4)


def test_load_reads_all_shards_of_a_split(tmp_path):
    rows = [*make_rows(5, split="test"), *make_rows(3, split="train", start=5), *make_rows(4, split="test", start=8)]
    for shard, part in enumerate((rows[:6], rows[6:])):
        folder = tmp_path / "shards" / f"{shard:05d}"
        folder.mkdir(parents=True)
        table = pa.Table.from_pylist(part, schema=TRACE_SCHEMA).append_column("prompt", pa.array([""] * len(part)))
        pq.write_table(table, folder / "traces.parquet")
    (tmp_path / "shards" / "00002.tmp-0123").mkdir()
    (tmp_path / "shards" / "00002.tmp-0123" / "traces.parquet").write_bytes(b"half")
    loaded, expected = load_traces(tmp_path, "test"), Traces.from_rows(rows)
    assert loaded.num_problems == 9
    np.testing.assert_array_equal(loaded.tokens_at, expected.tokens_at)
    np.testing.assert_array_equal(loaded.matches_at, expected.matches_at)


def test_load_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"ace_learn\.build"):
        load_traces(tmp_path, "test")
    folder = tmp_path / "shards" / "00000"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(make_rows(2), schema=TRACE_SCHEMA), folder / "traces.parquet")
    with pytest.raises(ValueError, match=r"calibration.*build more"):
        load_traces(tmp_path, "calibration")
    pq.write_table(pa.table({"split": ["test"]}), folder / "traces.parquet")
    with pytest.raises(ValueError, match=r"shard 00000 is not usable.*Delete the folder"):
        load_traces(tmp_path, "test")
    (folder / "traces.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"shard 00000 is not usable.*Delete the folder"):
        load_traces(tmp_path, "test")


def test_random_damage_is_a_named_shard_or_no_damage(tmp_path):
    folder = tmp_path / "shards" / "00000"
    folder.mkdir(parents=True)
    path = folder / "traces.parquet"
    pq.write_table(pa.Table.from_pylist(make_rows(30), schema=TRACE_SCHEMA), path)
    describe_shard(folder)
    verify_shards(tmp_path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            load_traces(tmp_path, "test")
        except ValueError as error:
            assert "00000" in str(error) or "split" in str(error) or "column" in str(error)  # noqa: PT017
        with pytest.raises(ValueError, match=r"shard 00000 is not usable.*traces\.parquet.*SHA-256.*run build again"):
            verify_shards(tmp_path)


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="probe_tokens"):
        Traces.from_rows([hand_rows()[0] | {"probe_tokens": [1]}])

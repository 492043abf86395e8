import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ace_learn.features import FeatureStore
from ace_learn.features.minimal import MinimalPositions, read_minimal
from tests.evaluate.synthetic import write_dataset

COLUMNS = {"problem": 0, "excluded": False, "boundary": [], "first": 0, "stable": 0, "think_start": 1, "think_end": 1}


def write_traces(folder, *rows):
    path = folder / "traces.parquet"
    pq.write_table(pa.Table.from_pylist([COLUMNS | row for row in rows]), path)
    return path


def test_targets_by_hand():
    """b* is the token 3 of problem 5, and the token 0 of problem 9."""
    minimal = MinimalPositions(torch.tensor([5, 9]), torch.tensor([3, 0]))
    nan = torch.nan
    stored = torch.tensor([[0.5, 0.1, 7.0, nan], [0.6, 0.2, 6.0, 1.0], [0.7, 0.3, 5.0, 0.0], [0.8, nan, nan, nan]])
    got = minimal.retarget(stored, trace=torch.tensor([5, 5, 9, 5]), position=torch.tensor([0, 3, 4, 1]))
    expected = torch.tensor([[0.5, 0.25, 3.0, nan], [0.6, 1.0, 0.0, 1.0], [0.7, 1.0, 0.0, 0.0], [0.8, nan, nan, nan]])
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert stored[0, 1] == torch.tensor(0.1)  # the stored targets are left alone


def test_positions_of_the_minimal_boundaries(tmp_path):
    path = write_traces(
        tmp_path,
        {"problem": 8, "boundary": [4, 9], "first": 0, "stable": 1, "think_start": 2, "think_end": 20},
        {"problem": 2, "boundary": [7], "first": 1, "stable": 1, "think_start": 2, "think_end": 14},  # the natural end
        {"problem": 3, "excluded": True, "think_start": -1, "think_end": -1},
        {"problem": 4, "boundary": [], "first": 0, "stable": 0, "think_start": 1, "think_end": 1},  # thought nothing
    )
    first, stable = (read_minimal([path], minimal) for minimal in ("first", "stable"))
    assert first.problem.tolist() == [2, 4, 8]
    assert first.position.tolist() == [11, 0, 4]
    assert stable.position.tolist() == [11, 0, 9]


def test_unknown_stable_boundaries_are_refused(tmp_path):
    path = write_traces(tmp_path, {"boundary": [4], "first": 0, "stable": -1, "think_end": 9})
    assert read_minimal([path], "first").position.tolist() == [4]
    with pytest.raises(ValueError, match="not known for 1 traces"):
        read_minimal([path], "stable")


@pytest.mark.parametrize("minimal", ["first", "stable"])
def test_a_store_gives_the_targets_of_either_boundary(tmp_path, minimal):
    write_dataset(tmp_path, {"train": 6, "validation": 4}, every_token=True)
    built, store = FeatureStore(tmp_path), FeatureStore(tmp_path, minimal=minimal)
    rows = torch.randperm(store.num_rows)
    got, stored = store.targets(rows).numpy(), built.targets(rows).numpy()
    traces = {row["problem"]: row for path in sorted(tmp_path.glob("shards/*/traces.parquet"))
              for row in pq.read_table(path).to_pylist()}  # fmt: skip
    for i, (number, t) in enumerate(zip(store.trace(rows).tolist(), store.position(rows).tolist(), strict=True)):
        row = traces[number]
        ends = [*row["boundary"], row["think_end"] - row["think_start"] - 1]
        end = ends[row[minimal]]
        assert got[i, 1] == pytest.approx(min(1.0, (t + 1) / (end + 1)))
        assert got[i, 2] == max(0, end - t)
    np.testing.assert_array_equal(got[:, [0, 3]], stored[:, [0, 3]])

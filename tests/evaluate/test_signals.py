import numpy as np
import pytest
import torch

from ace_learn.evaluate import signals as module
from ace_learn.evaluate.signals import SignalReader, boundary_signals, smoothed_signals
from ace_learn.evaluate.traces import Traces, load_traces
from ace_learn.exit.policy import ewma_step
from ace_learn.features import FeatureStore
from ace_learn.heads.head import natural
from ace_learn.signals import LEARNED
from tests.evaluate.synthetic import make_signals, write_dataset

SIZES = {"validation": 12, "test": 9}


def open_dataset(folder, **options) -> tuple[SignalReader, Traces]:
    write_dataset(folder, SIZES, **options)
    reader = SignalReader(FeatureStore(folder), natural, ("target_last",), batch_rows=7)
    return reader, load_traces(folder, "test")


def test_boundary_signals_are_joined_to_their_traces(tmp_path):
    reader, traces = open_dataset(tmp_path)
    expected = make_signals(traces)
    got = boundary_signals(reader, traces)
    learned = got[..., : len(LEARNED)]
    np.testing.assert_array_equal(np.isnan(learned), np.isnan(expected))
    np.testing.assert_allclose(learned, expected, rtol=1e-4, atol=1e-5)
    shuffled = traces.select(np.array([4, 0, 7]))
    np.testing.assert_array_equal(boundary_signals(reader, shuffled), got[[4, 0, 7]])


def test_smoothing_over_boundaries_equals_the_live_update(tmp_path):
    reader, traces = open_dataset(tmp_path)
    raw = torch.from_numpy(boundary_signals(reader, traces))
    got = smoothed_signals(reader, traces, ewma=0.3, smooth_over="boundaries")
    for i in range(traces.num_problems):
        average = raw[i, 0]
        for b in range(traces.num_boundaries[i]):
            average = raw[i, b] if b == 0 else ewma_step(average, raw[i, b], 0.3)
            np.testing.assert_array_equal(got[i, b], average.numpy())


@pytest.mark.parametrize("chunk", [1 << 23, 1500])
def test_smoothing_over_tokens_equals_the_slow_loop(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK_CELLS", chunk)
    reader, traces = open_dataset(tmp_path, every_token=True)
    got = smoothed_signals(reader, traces, ewma=0.2, smooth_over="tokens")
    store = reader.store
    rows = store.rows("test")
    per_token = reader.signals(rows)
    for i in range(traces.num_problems):
        mine = store.trace(rows) == int(traces.problem[i])
        values, average, column = per_token[mine], None, 0
        for t in range(len(values)):
            average = values[t] if average is None else ewma_step(average, values[t], 0.2)
            if traces.boundary[i, column] == t:
                np.testing.assert_array_equal(got[i, column], average.numpy())
                column += 1
        assert column == traces.num_boundaries[i]
    assert np.isnan(got[~traces.is_boundary]).all()


def test_no_smoothing_needs_no_token_rows(tmp_path):
    reader, traces = open_dataset(tmp_path)
    got = smoothed_signals(reader, traces, ewma=1.0, smooth_over="tokens")
    np.testing.assert_array_equal(got, boundary_signals(reader, traces))


def test_missing_token_rows_are_refused_with_a_remedy(tmp_path):
    reader, traces = open_dataset(tmp_path)
    with pytest.raises(ValueError, match="smooth over boundaries"):
        smoothed_signals(reader, traces, ewma=0.5, smooth_over="tokens")


def test_missing_boundary_rows_are_refused(tmp_path):
    reader, traces = open_dataset(tmp_path)
    problem = traces.problem.copy()
    problem[3] = 999  # the store knows no such problem
    other = Traces(**{name: getattr(traces, name) for name in traces.__dataclass_fields__} | {"problem": problem})
    with pytest.raises(ValueError, match="no feature row"):
        boundary_signals(reader, other)

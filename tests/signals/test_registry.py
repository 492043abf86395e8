import json
import math
import sys

import pytest
import torch

from ace_learn.evaluate.learned import PolicyFamily, fit_score_model
from ace_learn.evaluate.signals import SignalReader, boundary_signals
from ace_learn.evaluate.traces import load_traces
from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.features import FeatureStore
from ace_learn.heads.head import natural
from ace_learn.signals import (
    BY_NAME,
    CANDIDATES,
    DERIVED,
    LEARNED,
    SCALARS,
    SIGNALS,
    DerivedSignal,
    named,
    with_derived,
)
from ace_learn.signals._registry import discover
from tests.evaluate.synthetic import write_dataset
from tests.features.synthetic import Synthetic, make_dataset

MODULE = "from ace_learn.signals import DerivedSignal\nSIGNAL = DerivedSignal(name={name!r}, description='d', "
MODULE += "reads=('entropy',), compute=lambda columns: columns[..., 0])\n"


def rows(**columns):
    """Two rows of all running columns, zero where nothing is said."""
    scalars, candidates = torch.zeros(2, len(SCALARS)), torch.zeros(2, len(CANDIDATES))
    for name, values in columns.items():
        table, names = (scalars, SCALARS) if name in SCALARS else (candidates, CANDIDATES)
        table[:, names.index(name)] = torch.tensor(values)
    return {"scalars": scalars, "candidates": candidates}


def column(signals, name):
    return signals[..., SIGNALS.index(name)].tolist()


def test_learned_signals_come_first_and_derived_ones_by_name():
    assert LEARNED == ("confidence", "progress", "remaining", "consistency")
    assert SIGNALS[:4] == LEARNED
    assert SIGNALS[4:] == tuple(signal.name for signal in DERIVED) == tuple(sorted(SIGNALS[4:]))
    assert {"agreement", "entropy"} <= set(SIGNALS)
    assert [name for name in LEARNED if BY_NAME[name].falls] == ["remaining"]
    assert [name for name in LEARNED if BY_NAME[name].score_transform == "log1p"] == ["remaining"]


def test_derived_values_by_hand():
    features = rows(entropy=[0.5, 2.0], candidate_present=[0.0, 1.0], candidate_log_repeats=[0.0, math.log1p(3)])
    signals = with_derived(torch.full((2, 4), 0.25), features)
    assert signals.shape == (2, len(SIGNALS))
    assert (signals[:, :4] == 0.25).all()
    assert column(signals, "entropy") == [0.5, 2.0]
    assert column(signals, "agreement") == pytest.approx([0.0, 4.0])


def test_a_signal_without_its_source_is_nan_and_never_holds():
    features = {"scalars": rows(entropy=[0.5, 2.0])["scalars"]}
    signals = with_derived(torch.zeros(2, 4), features)
    assert column(signals, "entropy") == [0.5, 2.0]
    assert signals[:, SIGNALS.index("agreement")].isnan().all()
    for bound in (-1.0, 1e9):
        assert not ExitPolicy(predicate="any", thresholds={"agreement": bound}).holds(signals).any()
    score = ScoreModel(signals=("agreement",), weights=(1.0,), bias=9.0, threshold=0.1)
    assert not ExitPolicy(predicate="score", score=score).holds(signals).any()
    assert named(signals[0].tolist()).keys() == set(SIGNALS) - {"agreement", "acceptance"}


def test_policies_read_direction_and_transform_of_a_signal():
    signals = with_derived(torch.zeros(2, 4), rows(entropy=[0.5, 2.0], candidate_present=[0.0, 1.0]))
    assert ExitPolicy(predicate="all", thresholds={"entropy": 1.0}).holds(signals).tolist() == [True, False]
    assert ExitPolicy(predicate="all", thresholds={"agreement": 0.5}).holds(signals).tolist() == [False, True]
    score = ScoreModel(signals=("agreement", "entropy"), weights=(2.0, -1.0), bias=0.25, threshold=0.5)
    logits = [0.25 - 0.5, 0.25 + 2 * math.log(2) - 2.0]
    assert score.probability(signals).tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in logits])


def test_a_policy_file_names_its_signals_so_that_new_ones_do_not_move_it():
    """Another signal shifts the columns; a policy written before goes on reading its own."""
    written = json.dumps(ExitPolicy(predicate="all", thresholds={"entropy": 1.0, "progress": 0.4}).to_json())
    assert "agreement" not in written
    policy = ExitPolicy.from_json(json.loads(written))
    assert policy.signals == ("entropy", "progress")
    signals = with_derived(torch.tensor([[0.0, 0.5, 9.0, 0.0], [0.0, 0.3, 9.0, 0.0]]), rows(entropy=[0.5, 0.5]))
    assert policy.holds(signals).tolist() == [True, False]
    with pytest.raises(ValueError, match="needs its file in ace_learn/signals"):
        ExitPolicy(predicate="all", thresholds={"mood": 1.0})


def test_the_default_policy_family_reads_the_learned_signals():
    assert PolicyFamily().signals == LEARNED


def package(tmp_path, monkeypatch, **modules):
    folder = tmp_path / "strange_signals"
    folder.mkdir()
    for name, text in {"__init__": "", "_helper": "", **modules}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("strange_signals", *(f"strange_signals.{module}" for module in modules)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return discover("strange_signals", [str(folder)])


def test_modules_are_found_by_being_there(tmp_path, monkeypatch):
    found = package(tmp_path, monkeypatch, a=MODULE.format(name="zeal"), b=MODULE.format(name="mood"))
    assert [signal.name for signal in found] == ["mood", "zeal"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"a": "x = 1\n"}, r"strange_signals\.a defines no signal"),
        ({"a": "SIGNAL = 3\n"}, r"strange_signals\.a defines no signal"),
        ({"a": MODULE.format(name="mood"), "b": MODULE.format(name="mood")}, r"b names its signal 'mood', as does .*a"),
        ({"a": MODULE.format(name="remaining")}, "as does the learned signal remaining"),
    ],
)
def test_a_module_without_a_signal_of_its_own_is_refused(tmp_path, monkeypatch, modules, message):
    with pytest.raises(ValueError, match=message):
        package(tmp_path, monkeypatch, **modules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Mood"}, "lower-case identifier"),
        ({"description": ""}, "no description"),
        ({"reads": ()}, "it reads none"),
        ({"reads": ("entropy", "entropy")}, "each once"),
        ({"reads": ("mood",)}, "candidate_present"),
        ({"reads": ("entropy", "log_tokens"), "compute": None}, "reads 2 columns; give it a compute"),
    ],
)
def test_a_signal_that_could_not_be_read_is_refused(change, message):
    fields = {"name": "mood", "description": "d", "reads": ("entropy",), "compute": lambda columns: columns[..., 0]}
    with pytest.raises(ValueError, match=message):
        DerivedSignal(**fields | change)


def test_without_a_compute_a_signal_is_its_column():
    signal, features = DerivedSignal(name="mood", description="d", reads=("log_tokens",)), rows()
    assert torch.equal(signal.values(features), features["scalars"][..., 0])


def test_a_compute_of_the_wrong_shape_is_named():
    signal = DerivedSignal(name="mood", description="d", reads=("entropy",), compute=lambda columns: columns)
    with pytest.raises(ValueError, match=r"'mood': compute must turn columns \[2, 1\] into floats \[2\]"):
        signal.values(rows())


def test_replay_computes_derived_signals_from_the_stored_columns(tmp_path):
    stored = make_dataset(tmp_path / "data", Synthetic())
    reader = SignalReader(FeatureStore(tmp_path / "data"), natural_of_first_four, ("target_last",), batch_rows=64)
    signals = reader.signals(torch.tensor([5, 3]))
    assert column(signals, "entropy") == stored["scalars"][[5, 3], SCALARS.index("entropy")].tolist()
    assert signals[:, SIGNALS.index("agreement")].isnan().all()
    reader.require(("entropy", "confidence"))
    with pytest.raises(ValueError, match=r"agreement is computed from the feature source candidates.*build it again"):
        reader.require(("agreement",))


def natural_of_first_four(features):
    return natural(features[:, :4])


def test_a_data_set_without_running_columns_serves_policies_of_learned_signals(tmp_path):
    write_dataset(tmp_path, {"validation": 12, "test": 9})
    reader, traces = (
        SignalReader(FeatureStore(tmp_path), natural, ("target_last",)),
        load_traces(tmp_path, "validation"),
    )
    reader.require(LEARNED)
    signals = boundary_signals(reader, traces)
    assert fit_score_model(PolicyFamily(), signals, traces) is not None
    with pytest.raises(ValueError, match="feature source scalars"):
        reader.require(("entropy",))

"""Live runs against the replay, on a target that is not ours, and how their answers are judged."""

import json
import shutil

import numpy as np
import pytest

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Output, Request, SpeculationStats
from ace_learn.evaluate.live import (
    LiveConfig,
    answered_correctly,
    expected_tokens,
    live_run,
    load_records,
    measure_latency,
)
from ace_learn.evaluate.loading import replay_exits
from ace_learn.features import FeatureStore
from ace_learn.labels.build import build_dataset
from ace_learn.models.target import load_target
from ace_learn.speculation.drafters import DrafterConfig
from tests.helpers.records import make_record, write_head
from tests.labels.test_build import config_in

END = (2,)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A data set of a tiny target, the target, and a head whose policy exits here and there."""
    folder = tmp_path_factory.mktemp("live")
    config = config_in(folder, "qwen3", splits={"test": 16}, batch_size=16, shard_size=8)
    dataset = build_dataset(config)
    target = load_target(config.target)
    write_head(folder / "head", target.identity, data_sha256=FeatureStore(dataset).sha256)
    return dataset, target, folder / "head"


def output_of(tokens, answer):
    return Output(
        key=3, token_ids=tuple(tokens), logprobs=(0.0,) * len(tokens), finish_reason="contract", think_start=1,
        think_end=None, answer=answer, answer_text="", exit=None, stats=SpeculationStats(), seconds=1.0,
    )  # fmt: skip


def test_expected_tokens_by_hand():
    record = make_record()
    assert expected_tokens(record, 0, END) == (1, 11, 12, 2, 40)
    assert expected_tokens(record, 1, END) == (1, 11, 12, 13, 14, 2, 30)
    assert expected_tokens(record, 2, END) == (1, 11, 12, 13, 14, 2, 30)


def test_the_tasks_own_verdict_counts_where_the_tokens_are_the_expected_ones():
    judged = make_record(probe_correct=[True, False], full_correct=False)  # a verifier that disagrees with gold
    assert answered_correctly(judged, output_of([1, 11, 12, 2, 40], 8), 0, END)
    assert not answered_correctly(judged, output_of(judged.token_ids, 7), 1, END)
    assert not answered_correctly(judged, output_of(judged.token_ids, 7), 2, END)
    assert answered_correctly(judged, output_of([1, 11, 12, 2, 41], 7), 0, END)  # other tokens: equality with gold
    assert not answered_correctly(judged, output_of([1, 11, 12, 2, 41], 8), 0, END)
    assert not answered_correctly(make_record(gold=None), output_of([1, 11, 12, 2, 41], 7), 0, END)


def test_records_of_a_split_without_temporary_shards(world, tmp_path):
    dataset, _, _ = world
    expected = [record.problem for record in load_records(dataset, "test")]
    assert expected == sorted(expected)
    assert list(load_records(dataset, "train")) == []
    shutil.copytree(dataset, tmp_path / "dataset")
    half = tmp_path / "dataset" / "shards" / "00001.tmp-ab12cd34"
    half.mkdir()
    (half / "traces.parquet").write_bytes(b"half")
    assert [record.problem for record in load_records(tmp_path / "dataset", "test")] == expected


def test_the_live_run_equals_the_replay(world):
    dataset, target, head = world
    exits = replay_exits(dataset, head, "test").tolist()
    records = list(load_records(dataset, "test"))
    assert len(exits) == len(records)
    early = [exit_index < len(record.boundary) for exit_index, record in zip(exits, records, strict=True)]
    assert 0 < sum(early) < len(records)
    count = len(records) - 1
    entry, latency = live_run(target, dataset, head, exits, LiveConfig(problems=count, batch_size=4))
    assert (entry["n"], entry["equals_replay"], entry["first_differing"]) == (count, True, [])
    assert entry["exits"] == sum(early[:count])
    assert set(entry["methods"]) == {"full", "learned", "learned_ngram"}
    methods, shown = entry["methods"], records[:count]
    assert methods["full"]["accuracy"] == np.mean([record.full_correct for record in shown])
    assert methods["full"]["tokens_mean"] == np.mean([record.full_tokens for record in shown])
    lengths = [len(expected_tokens(r, e, target.markers.end)) for r, e in zip(shown, exits, strict=False)]
    assert methods["learned"]["tokens_mean"] == np.mean(lengths)
    assert methods["learned"]["drafted"] == 0
    assert latency.per_token_s > 0
    assert latency.prefill_s >= 0
    json.dumps(entry)


def test_a_live_run_that_differs_says_where(world):
    dataset, target, head = world
    exits = replay_exits(dataset, head, "test").tolist()
    records = list(load_records(dataset, "test"))
    place = next(i for i, record in enumerate(records) if exits[i] < len(record.boundary))
    wrong = [len(r.boundary) if i == place else e for i, (r, e) in enumerate(zip(records, exits, strict=True))]
    entry, _ = live_run(target, dataset, head, wrong, LiveConfig(problems=len(records), drafter=DrafterConfig()))
    assert entry["equals_replay"] is False
    assert entry["first_differing"] == [records[place].problem]
    assert entry["identical_learned"] == len(records) - 1
    assert set(entry["methods"]) == {"full", "learned"}


def test_sizes_that_cannot_be_run(world):
    dataset, target, head = world
    with pytest.raises(ValueError, match="fewer than the 17 of the live run"):
        live_run(target, dataset, head, [0] * 16, LiveConfig(problems=17))
    for wrong in ({"problems": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="need problems >= 1"):
            LiveConfig(**wrong)


def test_latency_of_outputs_of_one_length(world, monkeypatch):
    _, target, _ = world
    fixed = Output(**{**vars(output_of([1, 2, 3, 4], None)), "seconds": 2.0})
    monkeypatch.setattr(HFEngine, "generate", lambda self, requests: [fixed for _ in requests])
    engine, request = HFEngine(target), Request(key=0, prompt_ids=(5,))
    model = measure_latency(engine, engine, [request] * 3)
    assert (model.prefill_s, model.per_token_s) == (0.0, 0.5)

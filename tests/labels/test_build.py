"""Building data sets: what the labels say, and that a kill at any time changes nothing."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ace_learn.artifacts import sha256_file
from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.features import FeatureStore, verify_shards
from ace_learn.labels.build import BuildConfig, FeatureConfig, build_dataset
from ace_learn.labels.records import read_records
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.tasks import TaskConfig
from tests.helpers.targets import save_tiny, tiny_model


def write_table(path, count=40):
    rows = [{"prompt": f"the sum is {i % 10}{i // 10}?", "gold": str(7 + i % 3)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_in(folder, architecture="llama", **options):
    model = save_tiny(folder / "model", architecture)
    table = write_table(folder / "table.jsonl")
    values = {
        "target": TargetConfig(model=str(model), device="cpu"),
        "task": TaskConfig(name="table", path=table, contract={"kind": "boxed"}, gold_column="gold", instruct=False),
        "output": folder / "dataset",
        "splits": {"train": 16, "validation": 8, "test": 8},
        "max_new_tokens": 200,
        "max_answer_tokens": 30,
        "batch_size": 8,
        "shard_size": 8,
    }
    return BuildConfig(**values | options)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    config = config_in(tmp_path_factory.mktemp("build"), "qwen2", features=FeatureConfig(rows="all"))
    return config, build_dataset(config)


def records_of(dataset):
    return [r for shard in sorted((dataset / "shards").iterdir()) for r in read_records(shard / "traces.parquet")]


def digest(dataset):
    shards = sorted((dataset / "shards").iterdir())
    return {
        f"{shard.name}/{name}": sha256_file(shard / name)
        for shard in shards
        for name in ("traces.parquet", "features.safetensors", "shard.json")
    } | {name: sha256_file(dataset / name) for name in ("dataset.json", "summary.json")}


def test_every_problem_once_with_its_split(built):
    config, dataset = built
    records = records_of(dataset)
    assert [r.problem for r in records] == list(range(32))
    assert {s: sum(r.split == s for r in records) for s in config.splits} == config.splits
    assert (dataset / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((dataset / "provenance.json").read_text())["versions"]["torch"]


def test_probes_equal_live_answers_from_scratch(built):
    """Running prompt, thinking up to a boundary and think end from nothing gives the probe's tokens."""
    config, dataset = built
    target = load_target(config.target)
    usable = [r for r in records_of(dataset) if not r.excluded and r.boundary]
    assert len(usable) >= 10
    checked = 0
    for record in usable:
        for index in range(len(record.boundary)):
            length = record.think_start + record.boundary[index] + 1
            prefix = [*record.prompt_ids, *record.token_ids[:length], *target.markers.end]
            request = Request(
                key=record.problem,
                prompt_ids=tuple(prefix),
                contract=Contract.from_spec(record.contract),
                thinking=False,
                max_new_tokens=config.max_answer_tokens,
            )
            output = HFEngine(target, sampling=config.sampling).generate([request])[0]
            assert list(output.token_ids) == record.probe_token_ids[index]
            assert record.probe_tokens[index] == length + 1 + len(output.token_ids)
            assert record.probe_answer[index] == (None if output.answer is None else json.dumps(output.answer))
            checked += 1
    assert checked >= 20


def test_boundaries_and_matches_by_a_slow_reading(built):
    config, dataset = built
    target = load_target(config.target)
    contract = Contract.from_spec({"kind": "boxed"})
    for record in records_of(dataset):
        if record.excluded:
            assert record.boundary == []
            continue
        think = record.token_ids[record.think_start : record.think_end]
        texts = [target.decode([t]) for t in think]
        so_far = ["".join(texts[:i]) for i in range(len(think) + 1)]
        in_break = [bool(text.strip() and re.search(r"\n[^\S\n]*\n\s*\Z", text)) for text in so_far]
        completes = [i for i in range(len(think)) if in_break[i + 1] and not (in_break[i] and texts[i].isspace())]
        assert record.boundary == completes
        full = None if record.full_answer is None else json.loads(record.full_answer)
        for answer, matches, correct in zip(
            record.probe_answer, record.probe_matches, record.probe_correct, strict=True
        ):
            parsed = None if answer is None else json.loads(answer)
            assert matches == contract.equal(parsed, full)
            assert correct == contract.equal(parsed, json.loads(record.gold))


def test_features_are_aligned_with_the_traces(built):
    _, dataset = built
    store = FeatureStore(dataset)
    records = {r.problem: r for r in records_of(dataset)}
    for split in ("train", "test"):
        rows = store.rows(split)
        trace, position, boundary = store.trace(rows), store.position(rows), store.boundary(rows)
        targets = store.targets(rows)
        for i in range(0, len(rows), 7):
            record = records[int(trace[i])]
            assert record.split == split
            place = int(boundary[i])
            if place >= 0:
                assert record.boundary[place] == int(position[i])
                assert targets[i, 3] == record.probe_matches[place]
                assert targets[i, 0] == pytest.approx(record.boundary_confidence[place])
            else:
                assert targets[i, 3].isnan()
        lengths = {p: r.think_end - r.think_start for p, r in records.items() if r.split == split and not r.excluded}
        assert len(rows) == sum(lengths.values())  # rows="all": every thought token


def test_scalars_of_the_rows_by_a_slow_reading(built):
    """log tokens, log paragraphs and the log-probability statistics, recomputed from the model's logits."""
    config, dataset = built
    target = load_target(config.target)
    store = FeatureStore(dataset)
    rows = store.rows("test")
    scalars, trace, position = store.gather(rows, ["scalars"]), store.trace(rows), store.position(rows)
    record = next(r for r in records_of(dataset) if r.split == "test" and len(r.boundary) >= 2)
    ids = torch.tensor([[*record.prompt_ids, *record.token_ids]])
    out = target.forward(ids, torch.arange(ids.shape[1])[None], target.new_cache(1), longest=ids.shape[1])
    logprobs = out.logits[0].log_softmax(-1)
    first = len(record.prompt_ids) + record.think_start
    chosen = [float(logprobs[first + t - 1, ids[0, first + t]]) for t in range(record.think_end - record.think_start)]
    mine = (trace == record.problem).nonzero().flatten()
    assert len(mine) == len(chosen)
    for i in mine.tolist():
        t = int(position[i])
        passed = [b for b in record.boundary if b <= t]
        begins = next((b + 1 for b in reversed(record.boundary) if b < t), 0)
        paragraph = chosen[begins : t + 1]
        entropy = float(-(logprobs[first + t].exp() * logprobs[first + t]).sum())
        mean = sum(chosen[: t + 1]) / (t + 1)
        expected = [
            torch.tensor(t + 2.0).log().item(), torch.tensor(len(passed) + 1.0).log().item(), mean,
            min(chosen[: t + 1]), sum(paragraph) / len(paragraph), min(paragraph), entropy,
        ]  # fmt: skip
        assert scalars[i].tolist() == pytest.approx(expected, abs=1e-3)


def test_finished_folder_is_left_alone_and_another_recipe_is_refused(built, capsys):
    config, dataset = built
    before = digest(dataset)
    assert build_dataset(config) == dataset
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(ValueError, match="another recipe"):
        build_dataset(replace(config, seed=5))
    assert digest(dataset) == before


@pytest.fixture
def copied(built, tmp_path):
    """A finished data set that may be spoilt; where it lies is no part of its recipe."""
    config, dataset = built
    shutil.copytree(dataset, tmp_path / "dataset")
    return replace(config, output=tmp_path / "dataset")


@pytest.mark.parametrize(
    "lost",
    [
        ("shards/00001",),
        ("shards/00000", "shards/00003", "dataset.json"),
        ("shards/00002/shard.json",),
        ("dataset.json", "summary.json", "provenance.json"),  # killed before them
    ],
)
def test_what_is_missing_is_made_anew(copied, built, lost):
    before = digest(copied.output)
    for name in lost:
        path = copied.output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    build_dataset(copied)
    assert digest(copied.output) == before
    assert (copied.output / "provenance.json").is_file()
    verify_shards(copied.output)


def test_a_model_that_was_trained_on_is_refused_naming_it(copied, built, tmp_path):
    config, _ = built
    shutil.copytree(config.target.model, tmp_path / "model")
    (copied.output / "config.yaml").write_text(
        (copied.output / "config.yaml").read_text().replace(config.target.model, str(tmp_path / "model"))
    )
    moved = replace(copied, target=replace(config.target, model=str(tmp_path / "model")))
    build_dataset(moved)  # the same model in another place
    tiny_model("qwen2", seed=9).save_pretrained(tmp_path / "model")
    for lost in ((), ("shards/00001",)):
        for name in lost:
            shutil.rmtree(copied.output / name)
        with pytest.raises(ValueError, match=r"the model \(fingerprint: .*\) changed since") as caught:
            build_dataset(moved)
        assert "problems" not in str(caught.value)


def test_a_table_that_was_edited_is_refused_naming_it(tmp_path):
    config = config_in(tmp_path, splits={"train": 8})
    build_dataset(config)
    write_table(tmp_path / "table.jsonl", count=41)
    with pytest.raises(ValueError, match=r"the problems or their prompts .* changed since") as caught:
        build_dataset(config)
    assert "the model" not in str(caught.value)
    (config.output / "claim.json").unlink()
    with pytest.raises(ValueError, match=r"begun without a claim\.json"):
        build_dataset(config)
    (config.output / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds shards but no config\.yaml"):
        build_dataset(config)


def test_a_shard_without_usable_traces_is_no_reason_to_stop(tmp_path):
    config = config_in(tmp_path, splits={"train": 12}, shard_size=1, batch_size=1, max_new_tokens=45)
    build_dataset(config)
    counts = [json.loads((shard / "shard.json").read_text()) for shard in sorted((config.output / "shards").iterdir())]
    assert [count["usable"] + count["excluded"] for count in counts] == [1] * 12
    assert 0 < sum(count["usable"] for count in counts) < 12
    assert sum(count["answered"] for count in counts) < 12


def test_a_contract_that_never_commits_is_refused_and_nothing_is_written(tmp_path):
    contract = {"kind": "json", "schema": {"type": "object", "required": ["answer"]}}
    task = TaskConfig(name="table", path=write_table(tmp_path / "t.jsonl"), contract=contract)
    config = config_in(tmp_path, task=replace(task, instruct=False), splits={"train": 8})
    with pytest.raises(ValueError, match="never committed an answer in"):
        build_dataset(config)
    assert list((config.output / "shards").iterdir()) == []
    assert not (config.output / "dataset.json").exists()
    build_dataset(replace(config, task=replace(task, contract={"kind": "boxed"}, instruct=False)))  # as the error asks


def test_many_useless_traces_end_a_build_early(tmp_path, monkeypatch):
    monkeypatch.setattr("ace_learn.labels.build._ENOUGH_TRACES", 8)
    config = config_in(tmp_path, splits={"train": 16}, shard_size=2, max_new_tokens=1)
    with pytest.raises(ValueError, match="none of 8 traces"):
        build_dataset(config)
    assert list((config.output / "shards").iterdir()) == []


def test_traces_that_never_end_their_thinking_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--max_new_tokens"):
        build_dataset(config_in(tmp_path, splits={"train": 8}, max_new_tokens=1))


def test_recipes_that_cannot_be_built(tmp_path):
    for wrong, message in (
        ({"splits": {"training": 4}}, "splits must give counts"),
        ({"splits": {"train": 0}}, "splits must give counts"),
        ({"splits": {"train": 10**12, "test": 1}}, "1000000000001 problems are wanted, but a data set has at most"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            config_in(tmp_path, **wrong)
    with pytest.raises(ValueError, match="read by the source target_aux alone"):
        FeatureConfig(sources=("target_last",), aux_layers=(1,))
    with pytest.raises(ValueError, match="aux_layers"):
        build_dataset(config_in(tmp_path, features=FeatureConfig(aux_layers=(9,)), splits={"train": 8}))
    with pytest.raises(ValueError, match="40 distinct problems"):
        build_dataset(config_in(tmp_path, splits={"train": 80}))


_BUILD = """
import sys
from pathlib import Path
from tests.labels.test_build import config_in_place
from ace_learn.labels.build import build_dataset
print("started", flush=True)
build_dataset(config_in_place(Path(sys.argv[1])))
"""


def config_in_place(folder):
    """The recipe of a folder in which model and table stand already."""
    return BuildConfig(
        target=TargetConfig(model=str(folder / "model"), device="cpu"),
        task=TaskConfig(
            name="table", path=folder / "table.jsonl", contract={"kind": "boxed"}, gold_column="gold", instruct=False
        ),
        output=folder / "dataset",
        splits={"train": 40},
        max_new_tokens=200,
        max_answer_tokens=30,
        batch_size=4,
        shard_size=4,
    )


@pytest.mark.slow
def test_twenty_kills_leave_the_same_data_set(tmp_path):
    save_tiny(tmp_path / "model")
    write_table(tmp_path / "table.jsonl")
    reference = build_dataset(replace(config_in_place(tmp_path), output=tmp_path / "reference"))
    command = [sys.executable, "-c", _BUILD, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    draw, kills, shards_seen = random.Random(0), 0, set()
    while kills < 20:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.7 if kills < 16 else 1.5))
        finished = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kills += 1
        shards_seen.add(len(list((tmp_path / "dataset" / "shards").glob("?????"))))
        if finished:
            dataset = tmp_path / "dataset"
            assert digest(dataset) == digest(reference)
            assert (dataset / "provenance.json").is_file()
            for path in sorted(dataset.rglob("*"), reverse=True):  # start over, to be killed again
                path.rmdir() if path.is_dir() else path.unlink()
            dataset.rmdir()
    assert len(shards_seen) > 2  # the kills fell at different stages
    dataset = build_dataset(config_in_place(tmp_path))
    assert digest(dataset) == digest(reference)
    assert (dataset / "provenance.json").is_file()
    assert [r.problem for r in records_of(dataset)] == list(range(40))


def test_sampling_is_part_of_the_data_set(built):
    _, dataset = built
    described = json.loads((dataset / "dataset.json").read_text())
    assert described["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    assert Sampling.from_json(described["sampling"]) == Sampling()

"""Probing strategies: what they ask, what they conclude, and that an asked boundary has the answer that `all` gives."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.traces import load_traces
from ace_learn.features import SPLITS, FeatureStore, shard_folders
from ace_learn.labels.audit import count_probes, measure
from ace_learn.labels.build import BuildConfig, build_dataset
from ace_learn.labels.records import read_records
from ace_learn.labels.strategy import ProbingConfig, conclude, questions, rehearse, sample_key
from ace_learn.models.target import TargetConfig
from ace_learn.tasks import TaskConfig
from tests.helpers.records import make_record
from tests.helpers.targets import save_tiny

SAMPLES = 4


@given(st.integers(0, 40), st.data())
def test_bisection_finds_the_first_match_of_monotone_matches(count, data):
    first = data.draw(st.integers(0, count))
    matches = [i >= first for i in range(count)]
    asked, labels = rehearse("bisect", matches, free=[False] * count)
    assert labels == matches
    assert sum(asked) <= math.ceil(math.log2(count + 1))


@given(st.lists(st.booleans(), max_size=20))
def test_every_strategy_reports_its_probes_and_asks_no_boundary_twice(matches):
    free = [False] * len(matches)
    for strategy in ("all", "bisect", "first"):
        asked, labels = rehearse(strategy, matches, free=free)
        assert all(label == match for label, match, known in zip(labels, matches, asked, strict=True) if known)
    assert rehearse("all", matches, free=free) == ([True] * len(matches), matches)
    asked, labels = rehearse("first", matches, free=free)
    upto = matches.index(True) + 1 if True in matches else len(matches)
    assert asked == [i < upto for i in range(len(matches))]
    assert labels[upto:] == [None] * (len(matches) - upto)


def test_bisection_by_hand():
    known = [None] * 7
    assert questions("bisect", known) == [3]
    known[3] = False
    assert questions("bisect", known) == [5]
    known[5] = True
    assert questions("bisect", known) == [4]
    known[4] = True
    assert questions("bisect", known) == []
    assert conclude("bisect", known) == [False] * 4 + [True] * 3
    assert questions("bisect", [None, None, True]) == [1]  # the last is the natural end: known for nothing
    assert questions("first", [False, None, None]) == [1]


def test_samples_of_different_problems_share_no_noise():
    keys = [sample_key(number, sample) for number in (0, 1, 2, 2**40 - 1) for sample in range(5)]
    assert len(set(keys)) == len(keys)
    assert [sample_key(number, 0) for number in range(3)] == [0, 1, 2]
    assert min(sample_key(number, sample) for number in (0, 9) for sample in (1, 2)) >= 2**40


def test_the_audit_takes_its_share():
    chosen = [ProbingConfig(strategy="bisect", audit=0.25).audits(number) for number in range(4000)]
    assert 900 < sum(chosen) < 1100
    more = [ProbingConfig(strategy="bisect", audit=0.5).audits(number) for number in range(4000)]
    assert all(b for a, b in zip(chosen, more, strict=True) if a)
    probing = ProbingConfig(strategy="first", audit=0.25)
    number = chosen.index(True)
    assert probing.strategy_of(number, "train") == "all"
    assert probing.strategy_of(chosen.index(False), "train") == "first"
    assert probing.strategy_of(chosen.index(False), "test") == "all"


def test_disagreement_by_hand():
    """Matches F T F T F T at tokens 0 10 .. 50: bisection asks 3 (T), 1 (T), 0 (F), and takes 2 and 4 for matches."""
    record = make_record(
        split="train", boundary=[0, 10, 20, 30, 40, 50], think_start=0, think_end=60,
        probe_matches=[False, True, False, True, False, True], probe_asked=[True] * 6,
    )  # fmt: skip
    found = measure([record], ProbingConfig(strategy="bisect"), "first")
    assert (found.asked, found.boundaries, found.inferred, found.wrong) == (3, 6, 3, 2)
    assert (found.moved, found.shift_tokens) == (0, 0)
    stable = measure([record], ProbingConfig(strategy="bisect"), "stable")
    assert (stable.moved, stable.shift_tokens) == (1, 11 - 51)
    low, high = found.interval
    assert low < 2 / 3 < high
    assert measure([], ProbingConfig(strategy="bisect"), "first").interval == (0.0, 1.0)
    unanswered = replace(record, full_answer=None, probe_matches=[False] * 6)
    hopeless = measure([unanswered], ProbingConfig(strategy="bisect"), "first")
    assert (hopeless.asked, hopeless.boundaries, hopeless.inferred) == (0, 6, 0)
    assert measure([replace(record, think_end=51)], ProbingConfig(strategy="first"), "first").inferred == 0
    natural = replace(record, think_end=51, probe_asked=[True, False, False, True, False, True])
    assert count_probes([natural]) == (1, 5, 2)  # the last boundary is the natural end


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probing")
    rows = [{"prompt": f"the sum is {i % 10}{i // 10}?", "gold": str(7 + i % 3)} for i in range(14)]
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = BuildConfig(
        target=TargetConfig(model=str(save_tiny(folder / "model", "qwen2")), device="cpu"),
        task=TaskConfig(
            name="table", path=folder / "table.jsonl", contract={"kind": "boxed"}, gold_column="gold", instruct=False
        ),
        output=folder / "all",
        splits={"train": 10, "test": 4},
        max_new_tokens=150,
        max_answer_tokens=20,
        batch_size=7,
        shard_size=14,
    )
    built = {}

    def run(name, **probing):
        if name not in built:
            built[name] = build_dataset(
                replace(config, output=folder / name, probing=ProbingConfig(**probing), batch_size=7 + len(built))
            )
        return built[name]

    return run


def records_of(dataset):
    return [r for shard in shard_folders(dataset) for r in read_records(shard / "traces.parquet")]


ASKED = ("probe_answer", "probe_correct", "probe_tokens", "probe_token_ids")


@pytest.mark.parametrize("strategy", ["bisect", "first"])
def test_an_asked_boundary_has_the_answer_that_probing_all_gives(build, strategy):
    whole, dataset = build("all"), build(strategy, strategy=strategy)
    unasked = 0
    for true, record in zip(records_of(whole), records_of(dataset), strict=True):
        assert record.token_ids == true.token_ids
        if record.split == "test":
            assert record == true
            continue
        live = [match is True for match in true.probe_matches]
        free = true.ends_naturally if true.full_answer is not None else [True] * len(live)
        asked, labels = rehearse(strategy, live, free=free)
        known = [a or natural for a, natural in zip(asked, true.ends_naturally, strict=True)]
        assert record.probe_asked == known
        assert record.probe_matches == labels
        assert record.probe_match_rate == [None if label is None else float(label) for label in labels]
        for name in ASKED:
            values = [value if was else None for value, was in zip(getattr(true, name), known, strict=True)]
            assert getattr(record, name) == values
        assert record.first == (labels.index(True) if True in labels else len(labels))
        unasked += known.count(False)
    assert unasked >= 5
    summary = json.loads((dataset / "summary.json").read_text())["probing"]
    train = [r for r in records_of(dataset) if r.split == "train" and not r.excluded]
    assert summary["train"]["asked"] == count_probes(train).asked < summary["train"]["boundaries"]


def test_unknown_labels_are_nan_and_a_split_that_was_probed_in_part_is_not_replayed(build):
    dataset = build("first", strategy="first")
    store = FeatureStore(dataset)
    rows = store.rows("train", boundaries_only=True)
    records = {r.problem: r for r in records_of(dataset)}
    unknown = 0
    for target, trace, boundary in zip(store.targets(rows), store.trace(rows), store.boundary(rows), strict=True):
        label = records[int(trace)].probe_matches[int(boundary)]
        unknown += label is None
        assert target[3].isnan() if label is None else target[3] == label
        assert not target[:3].isnan().any()
    assert unknown > 0
    assert load_traces(dataset, "test").num_problems > 0
    with pytest.raises(ValueError, match="split 'train' was not probed at every boundary"):
        load_traces(dataset, "train")


def test_samples_make_consistency_a_share_and_leave_the_live_answer_alone(build):
    whole, dataset = build("all"), build("samples", samples=SAMPLES)
    soft = 0
    for true, record in zip(records_of(whole), records_of(dataset), strict=True):
        assert replace(record, probe_match_rate=true.probe_match_rate) == true
        for rate, match, free in zip(record.probe_match_rate, record.probe_matches, true.ends_naturally, strict=True):
            if record.split == "test" or free:
                assert rate == match
            else:
                assert rate * SAMPLES == pytest.approx(round(rate * SAMPLES))
                assert (rate > 0) if match else (rate < 1)
                soft += 0 < rate < 1
    assert soft >= 2
    store = FeatureStore(dataset)
    rows = store.rows("train", boundaries_only=True)
    rates = {(r.problem, i): rate for r in records_of(dataset) for i, rate in enumerate(r.probe_match_rate)}
    keys = zip(store.trace(rows).tolist(), store.boundary(rows).tolist(), strict=True)
    assert store.targets(rows)[:, 3].tolist() == pytest.approx([rates[key] for key in keys])


def test_an_audit_reports_cost_and_disagreement(build, capsys):
    dataset = build("audit", strategy="bisect", audit=0.5)
    audited = {n for n in range(14) if ProbingConfig(strategy="bisect", audit=0.5).audits(n)}
    train = [r for r in records_of(dataset) if r.split == SPLITS[0] and not r.excluded]
    assert all(all(r.probe_asked) for r in train if r.problem in audited)
    report = json.loads((dataset / "summary.json").read_text())["probing"]
    assert report["audit"]["traces"] == sum(r.problem in audited for r in train) > 0
    outside = [r for r in train if r.problem not in audited]
    assert report["outside_audit"] == {**count_probes(outside)._asdict(), "share": count_probes(outside).share}
    printed = capsys.readouterr().out
    assert "train traces outside the audit" in printed
    assert "inferred labels are wrong" in printed


def test_recipes_that_would_be_ignored_are_refused(tmp_path):
    def config(probing, **options):
        values = {"target": TargetConfig(model="m"), "output": tmp_path, "splits": {"train": 4}}
        return BuildConfig(**values | options, probing=probing)

    for wrong, message in (
        ({"samples": 0}, "samples >= 1"),
        ({"audit": 1.5, "strategy": "bisect"}, "audit <= 1"),
        ({"audit": 0.1}, "strategy `all` probes every boundary"),
    ):
        with pytest.raises(ValueError, match=message):
            ProbingConfig(**wrong)
    with pytest.raises(ValueError, match="at temperature 0"):
        config(ProbingConfig(samples=2), sampling=Sampling(temperature=0.0))
    with pytest.raises(ValueError, match="the train split alone"):
        config(ProbingConfig(strategy="bisect"), splits={"test": 4})
    with pytest.raises(ValueError, match="minimal `stable` needs"):
        config(ProbingConfig(strategy="first"), minimal="stable")

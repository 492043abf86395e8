"""The demo in miniature: real stages in order, the promised report, and a live run that equals the replay."""

import json
import shutil
from dataclasses import replace

import pytest

from ace_learn.cli.demo import DemoConfig, run_demo

ROW_KEYS = [
    "method", "n", "accuracy", "think_tokens_mean", "tokens_mean", "captured_savings", "lost_correct",
    "lost_correct_ucb95", "time_to_valid_answer_s", "valid_answers_per_s",
]  # fmt: skip
METHODS = ["full", "no_think", "budget", "confidence", "learned", "oracle"]


@pytest.mark.slow
def test_demo_in_miniature(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ace_learn.evaluate.live._LATENCY_PROBLEMS", 2)  # one by one, they take most of the time
    config = DemoConfig(
        output=tmp_path / "demo",
        train=80,
        validation=40,
        calibration=60,
        test=40,
        live_problems=20,
        alpha=0.2,
        batch_size=110,
        check=False,
    )
    run_demo(config)
    report = json.loads((config.output / "report.json").read_text())
    assert [list(row) for row in report["rows"]] == [ROW_KEYS] * 6
    assert [row["method"] for row in report["rows"]] == METHODS
    assert list(report["stages"]) == ["build", "train", "calibrate", "replay", "live"]
    assert report["live"]["n"] == 20
    assert report["live"]["equals_replay"] is True
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["oracle"]["captured_savings"] == 1.0
    assert rows["full"]["captured_savings"] == 0.0
    assert rows["full"]["tokens_mean"] > rows["learned"]["tokens_mean"] or report["policy"]["predicate"] == "never"
    assert (config.output / "pareto.png").read_bytes().startswith(b"\x89PNG")
    page = (config.output / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("full thinking", "learned exit", "Certificate", "Reliability", "Live run"))
    assert page.count("<svg") == 3
    early = rows["learned"]["tokens_mean"] < rows["full"]["tokens_mean"]
    assert (page.count("exit here") > 0) is early
    shown = capsys.readouterr()
    assert "MISSED: replayed on" in shown.err  # the thresholds were checked, and are too high for this size

    unfinished = tmp_path / "killed"
    shutil.copytree(config.output, unfinished)
    (unfinished / "report.json").unlink()
    (unfinished / "policy.tmp-0123abcd").mkdir()  # what a killed calibrate leaves
    mark = unfinished / "demo.json"  # as after a kill between the policy and its note
    stages = json.loads(mark.read_text())["stages"]
    mark.write_text(json.dumps({"stages": {name: stages[name] for name in ("build", "train")}}))
    run_demo(replace(config, output=unfinished))
    assert not (unfinished / "policy.tmp-0123abcd").exists()
    again = json.loads((unfinished / "report.json").read_text())
    assert list(again["stages"]) == ["build", "train", "calibrate", "replay", "live"]
    for name in ("build", "train"):
        assert again["stages"][name] == report["stages"][name]  # with the time that the work took
    assert again["stages"]["calibrate"]["sha256"] == report["stages"]["calibrate"]["sha256"]
    assert again["rows"][4]["tokens_mean"] == rows["learned"]["tokens_mean"]

    with pytest.raises(SystemExit) as stopped:
        run_demo(replace(config, seed=1, check=True))  # a finished demo is replaced; the misses fail it now
    assert stopped.value.code == 1
    other = json.loads((config.output / "report.json").read_text())
    assert other["stages"]["build"]["sha256"] != report["stages"]["build"]["sha256"]


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="something else than a demo"):
        run_demo(DemoConfig(output=tmp_path))
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("extra", [(), ("demo.json", "thesis.tex"), ("demo.json", "dataset.tmp-12", "thesis.tmp-12")])
def test_a_foreign_folder_with_a_config_is_left_alone(tmp_path, extra):
    """Every artifact holds a config.yaml: a data set, a head, a checkout that somebody points --output at."""
    (tmp_path / "config.yaml").write_text("target: {model: mine}\n")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "days of work").write_text("x")
    for name in extra:
        (tmp_path / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"something else than a demo .*shards.*; name another --output or empty it"):
        run_demo(DemoConfig(output=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["dataset", "head"])
def test_a_folder_of_demo_names_without_the_mark_is_left_alone(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(ValueError, match=r"it has no demo\.json"):
        run_demo(DemoConfig(output=tmp_path))
    assert (tmp_path / name).is_dir()
    assert (tmp_path / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"live_problems": 0}, "live_problems must be >= 1"),
        ({"test": 100}, "must not exceed test"),
        ({"calibration": 0}, "calibration must be >= 1"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"alpha": 1.0}, "alpha must lie between"),
    ],
)
def test_sizes_that_would_fail_at_the_end_are_refused_at_the_start(sizes, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**sizes)

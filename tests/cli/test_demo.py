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
def test_demo_in_miniature(tmp_path, capsys):
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
    shown = capsys.readouterr()
    assert "MISSED: replayed on" in shown.err  # the thresholds were checked, and are too high for this size

    unfinished = tmp_path / "killed"
    shutil.copytree(config.output, unfinished)
    for path in (unfinished / "report.json", unfinished / "policy"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed = replace(config, output=unfinished)
    (unfinished / "config.yaml").write_text((unfinished / "config.yaml").read_text().replace("/demo", "/killed"))
    (unfinished / "dataset" / "config.yaml").write_text(
        (unfinished / "dataset" / "config.yaml").read_text().replace("/demo", "/killed")
    )
    run_demo(resumed)
    again = json.loads((unfinished / "report.json").read_text())
    assert again["stages"]["build"]["sha256"] == report["stages"]["build"]["sha256"]
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

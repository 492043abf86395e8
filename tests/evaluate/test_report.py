import json
import sys

import numpy as np
import pytest

from ace_learn.evaluate.baselines import Budget, Confidence
from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.compare import METHODS, Splits, compare_methods, tune_baseline
from ace_learn.evaluate.learned import PolicyFamily, Risk, Scope, build_candidates, calibrate_policy
from ace_learn.evaluate.metrics import LatencyModel
from ace_learn.evaluate.replay import replay
from ace_learn.evaluate.report import demo_checks, report_json, report_markdown, write_report
from ace_learn.exit.policy import ExitPolicy
from tests.evaluate.synthetic import World, make_signals, make_traces

SCOPE = Scope(data_sha256="d" * 64, head_sha256="a" * 64, model_fingerprint="f" * 64, sampling={})
LATENCY = LatencyModel(prefill_s=0.05, per_token_s=0.004)
ROW_KEYS = [
    "method", "n", "accuracy", "think_tokens_mean", "tokens_mean", "captured_savings", "lost_correct",
    "lost_correct_ucb95", "time_to_valid_answer_s", "valid_answers_per_s",
]  # fmt: skip
LIVE = {"n": 200, "equals_replay": True, "differences": 0}
STAGES = {"build": {"sha256": "ab", "seconds": 3.0}}


@pytest.fixture(scope="module")
def splits():
    sizes = {"validation": 300, "calibration": 1000, "test": 1000}
    return Splits(*(make_traces(n, seed=i, split=name, world=WORLD) for i, (name, n) in enumerate(sizes.items())))


WORLD = World(noise=0.7)


@pytest.fixture(scope="module")
def evaluation(splits):
    signals = [make_signals(traces, seed=i, world=WORLD) for i, traces in enumerate(splits)]
    candidates = build_candidates(PolicyFamily(), signals[0], splits.validation, Risk())
    policy = calibrate_policy(candidates, signals[1], splits.calibration, risk=Risk(), scope=SCOPE).policy
    return compare_methods(
        splits, policy, signals[2], risk=Risk(), latency=LATENCY, bootstrap=Bootstrap(replicates=300, seed=1)
    )


def test_rows_are_complete_and_ordered(evaluation, splits):
    assert [row.method for row in evaluation.rows] == list(METHODS)
    rows = {row.method: row for row in evaluation.rows}
    assert rows["full"].captured_savings == 0.0
    assert rows["oracle"].captured_savings == 1.0
    assert rows["learned"].captured_savings > rows["budget"].captured_savings
    assert rows["learned"].accuracy == replay(splits.test, evaluation.exit_index).correct.mean()
    assert rows["learned"].lost_correct < 0.03
    assert evaluation.best_scalar in ("budget", "confidence")
    assert not evaluation.scalar_is_as_good
    assert set(evaluation.curves) == {"budget", "confidence", "learned"}
    assert evaluation.against_budgets.lower_bound > 0


def test_baselines_are_tuned_without_the_test_split(splits):
    tuned = tune_baseline(Budget(), splits, risk=Risk(alpha=0.1))
    again = tune_baseline(Budget(), splits._replace(test=make_traces(5, seed=9)), risk=Risk(alpha=0.1))
    assert tuned.threshold == again.threshold
    assert tuned.result.n == 1000
    assert tune_baseline(Confidence(), splits, risk=Risk(alpha=0.001)).threshold is None


def test_report_files(evaluation, tmp_path):
    report = write_report(tmp_path, evaluation, live=LIVE, stages=STAGES, latency=LATENCY, notes={"seed": 3})
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored == json.loads(json.dumps(report))
    assert [list(row) for row in stored["rows"]] == [ROW_KEYS] * len(METHODS)
    assert list(stored)[:3] == ["rows", "live", "stages"]
    assert stored["live"] == LIVE
    assert stored["stages"] == STAGES
    assert stored["seed"] == 3
    assert stored["intervals"]["learned"]["accuracy"][0] < stored["intervals"]["learned"]["accuracy"][1]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.md").read_text()
    assert all(f"| {method} |" in text for method in METHODS)
    assert "modelled" in text
    assert "pareto.png" in text
    assert "- equals_replay: True" in text
    assert demo_checks(stored) == []


def test_plotting_leaves_pyplot_alone(evaluation, tmp_path):
    write_report(tmp_path, evaluation, live=LIVE, stages=STAGES, latency=LATENCY)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def learned_row(report):
    return next(row for row in report["rows"] if row["method"] == "learned")


BREAKAGES = {
    "accuracy": lambda report: learned_row(report).update(accuracy=0.5),
    "captured savings": lambda report: learned_row(report).update(captured_savings=0.64),
    "captured savings are None": lambda report: learned_row(report).update(captured_savings=None),
    "lower bound": lambda report: report["comparisons"]["against_budgets"].update(lower_bound=0.0),
    "equal the replay": lambda report: report["live"].update(equals_replay=False),
    "replayed on 999": lambda report: learned_row(report).update(n=999),
    "live run on 199": lambda report: report["live"].update(n=199),
}


@pytest.mark.parametrize("wanted", BREAKAGES)
def test_each_threshold_of_the_demo_is_checked(evaluation, wanted):
    report = report_json(evaluation, live=dict(LIVE), stages=STAGES, latency=LATENCY, notes={})
    assert demo_checks(report) == []
    BREAKAGES[wanted](report)
    violated = demo_checks(report)
    assert len(violated) == 1
    assert wanted in violated[0]


def test_demo_checks_refuse_what_they_cannot_check():
    with pytest.raises(ValueError, match="rows for 'full' and 'learned'"):
        demo_checks({"rows": [], "live": {}})


def test_a_policy_that_never_exits_is_full_and_says_so(splits):
    signals = make_signals(splits.test, seed=2)
    evaluation = compare_methods(
        splits, ExitPolicy.never(), signals, risk=Risk(), latency=LATENCY, bootstrap=Bootstrap(replicates=50)
    )
    rows = {row.method: row for row in evaluation.rows}
    assert rows["learned"].tokens_mean == rows["full"].tokens_mean
    assert "learned" not in evaluation.curves
    text = report_markdown(evaluation, live={}, latency=LATENCY)
    assert "is `never`" in text
    assert evaluation.scalar_is_as_good == (
        not rows["learned"].captured_savings > rows[evaluation.best_scalar].captured_savings
    )


def test_a_world_where_the_oracle_saves_nothing_still_reports(tmp_path):
    world = World(early_guess=0.0, late_slip=1.0)
    splits = Splits(*(make_traces(60, seed=i, world=world) for i in range(3)))
    signals = make_signals(splits.test)
    evaluation = compare_methods(
        splits, ExitPolicy.never(), signals, risk=Risk(), latency=LATENCY, bootstrap=Bootstrap(replicates=50)
    )
    report = write_report(tmp_path, evaluation, live=LIVE, stages=STAGES, latency=LATENCY)
    assert all(row["captured_savings"] is None for row in report["rows"])
    assert "n/a" in (tmp_path / "report.md").read_text()
    assert np.isnan(evaluation.against_scalar.estimate)
    assert any("captured savings are None" in line for line in demo_checks(report))

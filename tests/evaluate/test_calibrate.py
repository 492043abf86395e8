import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml

from ace_learn.artifacts import read_fields, read_json, sha256_file, write_json
from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.calibrate import CalibrateConfig, explain, run_calibration
from ace_learn.evaluate.calibration import CalibrationResult, Certificate, calibrate
from ace_learn.evaluate.learned import CalibratedPolicy, Candidates, PolicyFamily, Risk
from ace_learn.evaluate.loading import evaluate_policy, replay_exits
from ace_learn.evaluate.metrics import LatencyModel
from ace_learn.evaluate.plots import plot_calibration
from ace_learn.exit.policy import ExitPolicy, load_policy
from ace_learn.heads.export import load_head
from tests.evaluate.synthetic import IDENTITY, World, write_dataset, write_identity_head

SIZES = {"validation": 150, "calibration": 600, "test": 150}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("calibrate")
    write_dataset(root / "data", SIZES, world=World(noise=0.6))
    write_identity_head(root / "head")
    return root


def config_of(folders, output, **options) -> CalibrateConfig:
    return CalibrateConfig(dataset=folders / "data", head=folders / "head", output=output, **options)


def test_calibration_writes_a_head_folder_with_a_certified_policy(folders, tmp_path):
    for left_by_the_killed in ("out.tmp-12", "another.tmp-12"):
        (tmp_path / left_by_the_killed).mkdir()
    summary = run_calibration(config_of(folders, tmp_path / "out", policy=PolicyFamily(ewma=0.8)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.tmp-12", "out"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "calibration.json", "calibration.png", "config.json", "config.yaml", "model.safetensors", "policy.json",
        "provenance.json",
    ]  # fmt: skip
    policy = ExitPolicy.from_json(json.loads((tmp_path / "out" / "policy.json").read_text()))
    assert policy == summary.calibrated.policy
    assert policy.predicate == "score"
    assert policy.ewma == 0.8
    certificate = Certificate.from_json(policy.certificate)
    assert certificate.sampling == {"temperature": 1.0}
    assert certificate.model_fingerprint == IDENTITY.fingerprint
    assert "certified lost-correct <= 2.0%" in summary.explanation
    report = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert report["splits"]["calibration"]["n"] == 600
    assert len(report["sequence"]) == len(certificate.grid)
    assert report["sequence"][certificate.chosen]["losses"] == certificate.losses
    recipe = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert recipe["policy"]["ewma"] == 0.8
    assert recipe["risk"]["loss"] == "lost_correct"
    inputs = read_fields(tmp_path / "out" / "provenance.json").fields("inputs")
    assert inputs.text("dataset") == sha256_file(folders / "data" / "dataset.json")
    assert load_head(tmp_path / "out", expect=IDENTITY).spec.sources == ("target_last",)


def test_the_calibrated_folder_is_evaluated_on_the_test_split(folders, tmp_path):
    run_calibration(config_of(folders, tmp_path / "out"))
    evaluation = evaluate_policy(
        folders / "data",
        tmp_path / "out",
        risk=Risk(),
        latency=LatencyModel(0.1, 0.01),
        bootstrap=Bootstrap(replicates=50),
    )
    assert evaluation.rows[0].n == 150
    np.testing.assert_array_equal(replay_exits(folders / "data", tmp_path / "out", "test"), evaluation.exit_index)
    assert {row.method: row for row in evaluation.rows}["learned"].captured_savings > 0.3


def test_a_head_without_a_policy_is_named(folders):
    with pytest.raises(ValueError, match=r"ace_learn\.calibrate"):
        load_policy(folders / "head")


def test_calibration_is_deterministic(folders, tmp_path):
    for name in ("a", "b"):
        run_calibration(config_of(folders, tmp_path / name))
    assert (tmp_path / "a" / "policy.json").read_bytes() == (tmp_path / "b" / "policy.json").read_bytes()


def test_refusal_writes_never_and_explains(folders, tmp_path, capsys):
    risk = Risk(alpha=0.001)
    summary = run_calibration(config_of(folders, tmp_path / "out", risk=risk))
    policy = ExitPolicy.from_json(json.loads((tmp_path / "out" / "policy.json").read_text()))
    assert policy == ExitPolicy.never()
    assert "the policy is 'never'" in summary.explanation
    assert "alpha >=" in summary.explanation
    assert summary.explanation in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "calibration.json").read_text())["explanation"] == summary.explanation


@pytest.mark.parametrize("method", ["bonferroni", "crc"])
@pytest.mark.parametrize("loss", ["lost_correct", "mismatch"])
def test_other_methods_and_losses(folders, tmp_path, method, loss):
    risk = Risk(method=method, loss=loss, alpha=0.05)
    summary = run_calibration(config_of(folders, tmp_path / "out", risk=risk, policy=PolicyFamily(predicate="any")))
    certificate = Certificate.from_json(summary.calibrated.policy.certificate)
    assert (certificate.method, certificate.loss) == (method, loss)
    assert ("expectation" in certificate.guarantee) == (method == "crc")


def test_smoothing_over_tokens(tmp_path):
    write_dataset(tmp_path / "data", {"validation": 60, "calibration": 300}, every_token=True)
    write_identity_head(tmp_path / "head")
    family = PolicyFamily(ewma=0.5, smooth_over="tokens")
    config = CalibrateConfig(
        dataset=tmp_path / "data",
        head=tmp_path / "head",
        output=tmp_path / "out",
        policy=family,
        risk=Risk(alpha=0.05),
    )
    assert run_calibration(config).calibrated.policy.smooth_over == "tokens"


def test_another_target_is_refused_and_nothing_is_left_behind(folders, tmp_path):
    write_identity_head(tmp_path / "other", replace(IDENTITY, fingerprint="0" * 64))
    config = CalibrateConfig(dataset=folders / "data", head=tmp_path / "other", output=tmp_path / "out")
    with pytest.raises(ValueError, match="fingerprint"):
        run_calibration(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_another_data_set_is_refused_naming_both_sides(folders, tmp_path):
    write_dataset(tmp_path / "data", {"validation": 20, "calibration": 30, "test": 20})
    description = read_json(tmp_path / "data" / "dataset.json")
    write_json(tmp_path / "data" / "dataset.json", {**description, "sha256": "e" * 64})
    config = CalibrateConfig(dataset=tmp_path / "data", head=folders / "head", output=tmp_path / "out")
    with pytest.raises(ValueError, match=f"another data set \\({'d' * 64}\\).*{'e' * 64}.*name the data set"):
        run_calibration(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_policy_of_another_head_is_refused_by_every_reader(folders, tmp_path):
    run_calibration(config_of(folders, tmp_path / "out"))
    certificate = Certificate.from_json(load_policy(tmp_path / "out").certificate)
    assert certificate.head_sha256 == load_head(folders / "head").weights_sha256
    write_identity_head(tmp_path / "other", scale=2.0)
    shutil.copyfile(tmp_path / "out" / "policy.json", tmp_path / "other" / "policy.json")
    other = load_head(tmp_path / "other").weights_sha256
    message = f"weights {certificate.head_sha256}.*weights {other}"
    with pytest.raises(ValueError, match=message):
        replay_exits(folders / "data", tmp_path / "other", "test")
    with pytest.raises(ValueError, match=message):
        evaluate_policy(
            folders / "data", tmp_path / "other", risk=Risk(), latency=LatencyModel(0.1, 0.01), bootstrap=Bootstrap()
        )


def test_a_damaged_shard_is_named(tmp_path):
    write_dataset(tmp_path / "data", {"validation": 20, "calibration": 30})
    write_identity_head(tmp_path / "head")
    path = tmp_path / "data" / "shards" / "00001" / "features.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-50] ^= 1  # inside a tensor: header and size are as they were
    path.write_bytes(damaged)
    config = CalibrateConfig(dataset=tmp_path / "data", head=tmp_path / "head", output=tmp_path / "out")
    with pytest.raises(ValueError, match=r"shard 00001 is not usable.*SHA-256"):
        run_calibration(config)


def test_an_existing_output_is_not_overwritten(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="exists already"):
        run_calibration(config_of(folders, tmp_path / "out"))
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_nothing_to_learn_is_explained(tmp_path):
    world = World(early_guess=0.0, late_slip=1.0)
    write_dataset(tmp_path / "data", {"validation": 20, "calibration": 30}, world=world)
    write_identity_head(tmp_path / "head")
    config = CalibrateConfig(dataset=tmp_path / "data", head=tmp_path / "head", output=tmp_path / "out")
    summary = run_calibration(config)
    assert "nothing to learn from" in summary.explanation
    assert np.array_equal(summary.calibrated.savings, np.zeros(0))


@pytest.mark.parametrize("savings", [0.0, -0.25])
def test_a_plot_of_candidates_that_save_nothing(tmp_path, savings):
    result = calibrate(np.zeros((2, 300), dtype=bool), alpha=0.02, delta=0.05, savings=np.full(2, savings))
    plot_calibration(tmp_path / "plot.png", CalibratedPolicy(ExitPolicy.never(), result, np.full(2, savings)), Risk())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_level_that_no_exit_could_miss_is_called_what_it_is():
    none = np.zeros(0, dtype=np.int64)
    result = CalibrationResult(None, none, none, np.zeros(0), 100, "nothing certifies")
    never = CalibratedPolicy(ExitPolicy.never(), result, np.zeros(0))
    risk = Risk(alpha=0.02)
    shown = [explain(never, Candidates((), "none"), risk, full_accuracy=share) for share in (0.0, 0.02, 0.021)]
    assert ["says nothing" in text for text in shown] == [True, True, False]
    mismatch = Risk(loss="mismatch", alpha=0.02)
    assert "Caution" not in explain(never, Candidates((), "none"), mismatch, full_accuracy=0.0)

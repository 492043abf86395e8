"""Training runs: they learn, they resume, they refuse."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ace_learn.artifacts import JSON, dump_config, is_temporary, read_fields, read_json, write_json, writer_lock
from ace_learn.features import FeatureStore
from ace_learn.heads import (
    HeadConfig,
    LossWeights,
    OptimizerConfig,
    TrainConfig,
    TrainerConfig,
    WeightingConfig,
    load_head,
)
from ace_learn.heads.config import Accelerator, Precision
from ace_learn.heads.data import Batch, FeatureTable
from ace_learn.heads.losses import Balance, loss_sums
from ace_learn.heads.module import HeadModule
from ace_learn.heads.train import predict, train_head
from ace_learn.models.identity import TargetIdentity
from ace_learn.signals import LEARNED
from tests.features.synthetic import Synthetic, make_dataset, make_rows, target_json
from tests.heads.test_head import head_config

GOLDEN = {
    "fixed": Path(__file__).with_name("golden_losses.json"),
    "gradient": Path(__file__).with_name("golden_losses_gradient.json"),
}
_GRADIENT = WeightingConfig(kind="gradient")
_SIZES = Synthetic(problems=80, boundaries=4, paragraph=2, noise=0.2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    make_dataset(folder, _SIZES)
    return folder


@pytest.fixture(autouse=True)
def _keep_the_global_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def _config(dataset: Path, output: Path, arch: str = "ensemble") -> TrainConfig:
    return TrainConfig(
        dataset=dataset,
        output=output,
        head=head_config(arch, width=8, members=2, dropout=0.1),
        trainer=TrainerConfig(accelerator="cpu", progress_bar=False),
        optimizer=OptimizerConfig(lr=1e-2),
        batch_size=32,
        max_epochs=5,
        patience=5,
    )


def test_a_linear_head_recovers_a_linear_problem(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", Synthetic(problems=300, boundaries=5, paragraph=1))
    config = replace(
        _config(tmp_path / "data", tmp_path / "head", "linear"),
        sources=("target_last",),
        max_epochs=25,
        optimizer=OptimizerConfig(lr=3e-2, weight_decay=0.0),
        head=HeadConfig(arch="linear"),
    )
    report = train_head(config)
    for metrics in (report.head.confidence, report.head.progress, report.head.remaining_log):
        assert metrics.r2 is not None
        assert metrics.r2 > 0.98
    assert report.head.consistency.auc is not None
    assert report.head.consistency.auc > 0.99

    head = load_head(tmp_path / "head").head
    generator = torch.Generator().manual_seed(0)
    count = 300 * 5
    for width in (6, 12, 7):  # the draws before the true weights, as the synthetic data set makes them
        torch.randn(count, width, generator=generator)
    true = torch.randn(4, 6, generator=generator) / 6**0.5
    learned = (head.layers[0].weight[0].T / head.std)[:2]
    torch.testing.assert_close(learned, true[:2], atol=0.05, rtol=0.05)


def test_the_folder_is_complete_and_describes_the_run(dataset: Path, tmp_path: Path) -> None:
    config = _config(dataset, tmp_path / "head")
    report = train_head(config)
    names = {path.name for path in config.output.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.json", "model.safetensors", "metrics.json", "curve.png", "config.yaml", "provenance.json"),
        *("logs", "checkpoints"),
    }
    assert list((config.output / "logs").glob("events.out.tfevents*"))
    loaded = load_head(config.output, TargetIdentity.from_json(target_json()))
    assert loaded.card.config == config.head
    assert loaded.card.data_sha256 == "d" * 64
    assert loaded.card.metrics == report.head.to_json()
    assert (config.output / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert read_fields(config.output / "provenance.json").fields("inputs").text("dataset")
    assert report.rows == (50 * 4, 10 * 4)
    assert len(report.history) == 5
    assert any("consistency auc" in line for line in report.lines())

    store = FeatureStore(dataset)
    table = FeatureTable(store, store.rows("validation", True), sources=config.sources, memory_limit=0)
    assert predict(loaded.head, table).shape == (40, 4)


def test_config_yaml_runs_the_run_again(dataset: Path, tmp_path: Path) -> None:
    config = _config(dataset, tmp_path / "head", "linear")
    train_head(replace(config, max_epochs=1))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, "run", as_group=True)
    values = {"run": read_yaml(config.output / "config.yaml")}
    parsed = parser.instantiate(parser.parse_object(values)).run
    assert parsed == replace(config, max_epochs=1)


def read_yaml(path: Path) -> dict[str, JSON]:
    import yaml

    return yaml.safe_load(path.read_text())


def test_a_finished_run_is_reported_again_and_another_one_refused(dataset: Path, tmp_path: Path) -> None:
    config = replace(_config(dataset, tmp_path / "head", "linear"), max_epochs=1)
    report = train_head(config)
    before = (config.output / "model.safetensors").stat().st_mtime_ns
    assert train_head(config) == report
    assert (config.output / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="belongs to another run: seed is 0 there, 7 here"):
        train_head(replace(config, seed=7))
    with writer_lock(config.output), pytest.raises(ValueError, match="being written by another process"):
        train_head(config)


_KILLED = """
import os, signal, sys
from pathlib import Path
from ace_learn.heads import HeadConfig, OptimizerConfig, TrainConfig, TrainerConfig
from ace_learn.heads.module import HeadModule
from ace_learn.heads.train import train_head

step = HeadModule.training_step
def training_step(self, batch, batch_idx):
    if self.current_epoch == 2 and batch_idx == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, batch_idx)
HeadModule.training_step = training_step
train_head(TrainConfig(
    dataset=Path(sys.argv[1]), output=Path(sys.argv[2]),
    head=HeadConfig(arch="ensemble", width=8, members=2, dropout=0.1),
    trainer=TrainerConfig(accelerator="cpu", progress_bar=False), optimizer=OptimizerConfig(lr=1e-2),
    batch_size=32, max_epochs=5, patience=5,
))
"""


@pytest.mark.slow
def test_a_killed_run_ends_as_the_uninterrupted_one(dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(dataset), str(output)], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with pytest.raises(ValueError, match="holds no finished head"):
        load_head(output)
    _same_outcome(_config(dataset, output), _config(dataset, tmp_path / "straight"))


@pytest.mark.parametrize("weighting", [WeightingConfig(), _GRADIENT], ids=lambda weighting: weighting.kind)
def test_a_run_interrupted_at_each_stage_ends_as_the_uninterrupted_one(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighting: WeightingConfig
) -> None:
    config = replace(_config(dataset, tmp_path / "head"), weighting=weighting)
    step = HeadModule.training_step

    def interrupted_step(self: HeadModule, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 2 and batch_idx == 3:
            raise InterruptedError("in a step")
        return step(self, batch, batch_idx)

    def interrupted_publish(*_: object, **__: object) -> None:
        raise InterruptedError("in the export")

    def second_fit(*_: object, **__: object) -> None:
        raise AssertionError("the run was fitted already")

    with monkeypatch.context() as patch:
        patch.setattr(HeadModule, "training_step", interrupted_step)
        with pytest.raises(InterruptedError, match="in a step"):
            train_head(config)
    with monkeypatch.context() as patch:
        patch.setattr("ace_learn.heads.train.publish", interrupted_publish)
        with pytest.raises(InterruptedError, match="in the export"):
            train_head(config)
    with pytest.raises(ValueError, match="holds no finished head"):
        load_head(config.output)
    with monkeypatch.context() as patch:
        patch.setattr("ace_learn.heads.runs.Trainer.fit", second_fit)
        train_head(config)
    _same_outcome(config, replace(config, output=tmp_path / "straight"))


def _same_outcome(resumed: TrainConfig, straight: TrainConfig) -> None:
    assert train_head(resumed) == train_head(straight)
    ours, theirs = (load_file(config.output / "model.safetensors") for config in (resumed, straight))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not any(is_temporary(path) for path in resumed.output.iterdir())


def test_early_stopping_keeps_the_best_epoch(dataset: Path, tmp_path: Path) -> None:
    config = replace(_config(dataset, tmp_path / "head"), max_epochs=60, patience=2, optimizer=OptimizerConfig(lr=5e-2))
    report = train_head(config)
    losses = [entry["validation"] for entry in report.history]
    assert len(losses) < 60
    assert report.best_epoch == losses.index(min(losses)) == len(losses) - 1 - 2
    head = load_head(config.output).head
    store = FeatureStore(dataset)
    table = FeatureTable(store, store.rows("validation", True), sources=config.sources, memory_limit=0)
    sums = loss_sums(head.raw(table.batch(torch.arange(len(table))).features), table.targets)
    assert sums.weighted(config.losses.tensor()).item() == pytest.approx(min(losses), rel=1e-5)


def test_a_diverged_run_says_so_again_and_again(dataset: Path, tmp_path: Path) -> None:
    config = replace(_config(dataset, tmp_path / "head", "linear"), optimizer=OptimizerConfig(lr=1e30))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"training diverged.*lower optimizer\.lr"):
            train_head(config)
    with pytest.raises(ValueError, match="no finished head"):
        load_head(config.output)


def test_a_damaged_checkpoint_is_named(dataset: Path, tmp_path: Path) -> None:
    config = _config(dataset, tmp_path / "head", "linear")
    last = config.output / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"last\.ckpt is missing or damaged; delete .*checkpoints and run train again"):
        train_head(config)


def test_a_missing_device_or_data_set_leaves_no_output(dataset: Path, tmp_path: Path) -> None:
    config = _config(dataset, tmp_path / "head")
    with pytest.raises(ValueError, match=r"trainer\.devices is 99, but of gpu torch sees"):
        train_head(replace(config, batch_size=99, trainer=TrainerConfig(accelerator="gpu", devices=99)))
    with pytest.raises(ValueError, match="not a finished data set"):
        train_head(replace(config, dataset=tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_missing_sources_are_named(dataset: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", _SIZES)
    description = read_json(tmp_path / "data" / "dataset.json")
    assert isinstance(description, dict)
    features = description["features"]
    assert isinstance(features, dict)
    features["sources"] = ["scalars"]
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="hold scalars but not target_last"):
        train_head(replace(_config(tmp_path / "data", tmp_path / "head"), sources=("target_last",)))


def test_gradient_weights_are_logged_and_leave_the_validation_objective_alone(dataset: Path, tmp_path: Path) -> None:
    losses = LossWeights(progress=0.0)
    config = replace(_config(dataset, tmp_path / "head"), max_epochs=2, weighting=_GRADIENT, losses=losses)
    report = train_head(config)
    assert train_head(config) == report  # read back from metrics.json
    fixed = {signal: getattr(losses, signal) for signal in LEARNED}
    for epoch in report.history:
        assert epoch["weights"]["progress"] == 0
        assert sum(epoch["weights"].values()) == pytest.approx(3)
        assert set(epoch["gradient_norms"]) == set(epoch["train_losses"]) == set(LEARNED)
        objective = sum(fixed[signal] * epoch["validation_losses"][signal] for signal in LEARNED)
        assert epoch["validation"] == pytest.approx(objective, rel=1e-5)
    events = EventAccumulator(str(config.output / "logs")).Reload()
    assert {
        f"{kind}/{signal}" for kind in ("weight", "gradient_norm", "train", "validation") for signal in LEARNED
    } <= (set(events.Tags()["scalars"]))


def test_balanced_consistency_keeps_the_order_and_moves_the_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(_SIZES)
    rows["targets"][:, 3] *= (rows["target_last"][:, 0] > 0.5).float()  # few rows match
    monkeypatch.setattr("tests.features.synthetic.make_rows", lambda _: rows)
    make_dataset(tmp_path / "data", _SIZES)
    found = {}
    balances: tuple[Balance, ...] = ("none", "balanced")
    for balance in balances:
        config = _config(tmp_path / "data", tmp_path / balance, "linear")
        report = train_head(replace(config, max_epochs=20, losses=LossWeights(consistency_balance=balance)))
        found[balance] = report.head.consistency
    none, balanced = found["none"], found["balanced"]
    assert none.auc is not None
    assert balanced.auc == pytest.approx(none.auc, abs=0.05)
    assert none.ece is not None
    assert balanced.ece is not None
    assert balanced.ece > none.ece + 0.05
    assert balanced.base_rate == none.base_rate


def test_bfloat16_stays_close_to_float32(dataset: Path, tmp_path: Path) -> None:
    curves = []
    precisions: tuple[Precision, ...] = ("32-true", "bf16-mixed")
    for precision in precisions:
        config = replace(_config(dataset, tmp_path / precision), weighting=_GRADIENT, max_epochs=3)
        report = train_head(replace(config, trainer=replace(config.trainer, precision=precision)))
        curves.append(torch.tensor([epoch["validation"] for epoch in report.history]))
    assert not torch.equal(*curves)
    torch.testing.assert_close(*curves, rtol=3e-2, atol=0)


def test_runs_of_before_the_newer_fields_are_taken_up(dataset: Path, tmp_path: Path) -> None:
    config = replace(_config(dataset, tmp_path / "head", "linear"), max_epochs=1)
    report = train_head(config)
    claim = dict(read_fields(config.output / "checkpoints" / "run.json").data)
    losses = claim["losses"]
    assert isinstance(losses, dict)
    del claim["weighting"], claim["span"], losses["consistency_balance"]
    write_json(config.output / "checkpoints" / "run.json", claim)
    metrics = dict(read_fields(config.output / "metrics.json").data)
    metrics["history"] = [{"train": 1.0, "validation": report.history[0]["validation"]}]
    write_json(config.output / "metrics.json", metrics)
    assert train_head(config).history[0]["validation"] == report.history[0]["validation"]
    with pytest.raises(ValueError, match="span is 'whole' there, 'minimal_prefix' here"):
        train_head(replace(config, span="minimal_prefix"))


@pytest.mark.parametrize(
    ("accelerator", "devices", "message"),
    [
        ("cpu", 0, "at least 1"),
        ("mps", 2, "one device"),
        ("cpu", 99, "a batch of 32 rows cannot be divided among 99 devices"),
    ],
)
def test_devices_are_checked(
    dataset: Path, tmp_path: Path, accelerator: Accelerator, devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(_config(dataset, tmp_path), trainer=TrainerConfig(accelerator=accelerator, devices=devices))


@pytest.mark.slow
def test_two_processes_train_as_one(dataset: Path, tmp_path: Path) -> None:
    """50 * 4 rows in batches of 33 over two processes: uneven parts, and a last batch of two rows."""
    one = replace(_config(dataset, tmp_path / "one"), batch_size=33, max_epochs=3)
    one = replace(one, head=HeadConfig(arch="ensemble", width=8, members=2))
    report = train_head(one)
    recipe = tmp_path / "two.yaml"
    two = replace(one, output=tmp_path / "two", trainer=replace(one.trainer, devices=2, strategy="ddp"))
    recipe.write_text(dump_config(two))
    done = subprocess.run(
        [sys.executable, "-m", "ace_learn.train", str(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = train_head(two)  # finished: reports again
    assert found.rows == report.rows
    for ours, theirs in zip(found.history, report.history, strict=True):
        assert ours["train"] == pytest.approx(theirs["train"], rel=1e-4)
        assert ours["validation_losses"] == pytest.approx(theirs["validation_losses"], rel=1e-4)
    torch.testing.assert_close(
        load_file(two.output / "model.safetensors"), load_file(one.output / "model.safetensors"), rtol=1e-3, atol=1e-4
    )


def _losses(dataset: Path, output: Path, kind: str) -> dict[str, list[list[float]]]:
    curves = {}
    for arch in ("linear", "mlp", "ensemble") if kind == "fixed" else ("mlp", "ensemble"):
        weighting = WeightingConfig() if kind == "fixed" else _GRADIENT
        report = train_head(replace(_config(dataset, output / kind / arch, arch), weighting=weighting))
        curves[arch] = [[entry["train"], entry["validation"]] for entry in report.history]
    return curves


@pytest.mark.parametrize("kind", list(GOLDEN))
def test_golden_loss_curves(dataset: Path, tmp_path: Path, kind: str) -> None:
    """After a wanted change: `python -m tests.heads.test_train` writes the files anew; say in the commit why."""
    golden = json.loads(GOLDEN[kind].read_text())
    found = _losses(dataset, tmp_path, kind)
    assert found.keys() == golden.keys()
    for arch, curve in golden.items():
        torch.testing.assert_close(torch.tensor(found[arch]), torch.tensor(curve), rtol=1e-4, atol=0, msg=arch)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        make_dataset(Path(scratch) / "data", _SIZES)
        for name, file in GOLDEN.items():
            file.write_text(json.dumps(_losses(Path(scratch) / "data", Path(scratch), name), indent=1) + "\n")

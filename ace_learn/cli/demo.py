"""`python -m ace_learn.demo`: the main job on the embedded reasoner, from problems to a report."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ace_learn.artifacts import JSON, dump_config, sha256_file, sha256_folder, write_text
from ace_learn.cli.common import run_command

if TYPE_CHECKING:
    from ace_learn.evaluate.calibrate import CalibrateConfig
    from ace_learn.heads.config import TrainConfig
    from ace_learn.labels.build import BuildConfig

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo. The smallest split sizes with a meaningful certificate are the defaults."""

    output: Path = Path("runs/demo")
    """Folder of all stages; a finished demo in it is replaced, a killed one is resumed."""
    seed: int = 0
    """Changes the problems, the sampling noise and the training."""
    train: int = 1200
    """Problems to train the head on."""
    validation: int = 300
    """Problems for early stopping and for fixing the candidate policies."""
    calibration: int = 1000
    """Problems for the certificate."""
    test: int = 1000
    """Held-out problems for the report."""
    alpha: float = 0.02
    """Share of problems that an exit may lose."""
    live_problems: int = 200
    """Test problems that are run live as well."""
    batch_size: int = 250
    """Requests decoded together when building."""
    check: bool = True
    """Exit with status 1 when the report misses the demo's thresholds."""


class _Stages:
    """Runs the stages in order and notes what each took and made."""

    def __init__(self) -> None:
        self.notes: dict[str, JSON] = {}

    def run(self, name: str, artifact: Path, work: Callable[[], Result]) -> Result:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        result = work()
        digest = sha256_folder(artifact) if artifact.is_dir() else sha256_file(artifact)
        self.notes[name] = {"seconds": round(time.monotonic() - start, 1), "sha256": digest, "artifact": artifact.name}
        return result


def run_demo(config: DemoConfig) -> None:
    """Builds, trains, calibrates, replays and runs live; writes the report; checks it.

    Raises:
        ValueError: A stage was refused.
        SystemExit: With status 1, when the report misses a threshold.
    """
    from ace_learn.evaluate.calibrate import run_calibration
    from ace_learn.evaluate.report import demo_checks
    from ace_learn.heads.train import train_head
    from ace_learn.labels.build import build_dataset

    output = _claim(config)
    stages = _Stages()
    stages.run("build", output / "dataset", lambda: build_dataset(build_config(config)))
    stages.run("train", output / "head", lambda: train_head(train_config(config)))
    if not (output / "policy" / "policy.json").exists():
        stages.run("calibrate", output / "policy", lambda: run_calibration(calibrate_config(config)))
    report = _report(config, stages)
    print((output / "report.md").read_text(encoding="utf-8"))
    failures = demo_checks(report)
    for failure in failures:
        print(f"MISSED: {failure}", file=sys.stderr)
    if failures and config.check:
        sys.exit(1)


def _claim(config: DemoConfig) -> Path:
    """The demo's folder: emptied unless it holds an unfinished run of this very recipe."""
    output, recipe = config.output, config.output / "config.yaml"
    unfinished = recipe.exists() and not (output / "report.json").exists()
    if output.exists() and not (unfinished and recipe.read_text(encoding="utf-8") == dump_config(config)):
        if not recipe.exists() and any(output.iterdir()):
            raise ValueError(f"{output} holds something else than a demo; name another --output or empty it")
        shutil.rmtree(output)
    write_text(recipe, dump_config(config))
    return output


def build_config(config: DemoConfig) -> BuildConfig:
    """The demo's build stage."""
    from ace_learn.engines.sampling import Sampling
    from ace_learn.labels.build import BuildConfig
    from ace_learn.models.target import EMBEDDED, TargetConfig

    return BuildConfig(
        target=TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"),
        output=config.output / "dataset",
        splits={
            "train": config.train,
            "validation": config.validation,
            "calibration": config.calibration,
            "test": config.test,
        },
        sampling=Sampling(temperature=1.0, seed=config.seed),
        max_new_tokens=480,
        max_answer_tokens=48,
        batch_size=config.batch_size,
        shard_size=2 * config.batch_size,
        seed=config.seed,
    )


def train_config(config: DemoConfig) -> TrainConfig:
    """The demo's training stage."""
    from ace_learn.heads.config import TrainConfig, TrainerConfig
    from ace_learn.heads.head import HeadConfig

    return TrainConfig(
        dataset=config.output / "dataset",
        output=config.output / "head",
        head=HeadConfig(arch="ensemble", width=64, members=3),
        trainer=TrainerConfig(accelerator="cpu"),
        seed=config.seed,
    )


def calibrate_config(config: DemoConfig) -> CalibrateConfig:
    """The demo's calibration stage."""
    from ace_learn.evaluate.calibrate import CalibrateConfig
    from ace_learn.evaluate.learned import Risk

    return CalibrateConfig(
        dataset=config.output / "dataset",
        head=config.output / "head",
        output=config.output / "policy",
        risk=Risk(alpha=config.alpha),
    )


def _report(config: DemoConfig, stages: _Stages) -> dict[str, JSON]:
    """Replays the test split, runs part of it live, and writes the report."""
    from ace_learn.evaluate.bootstrap import Bootstrap
    from ace_learn.evaluate.learned import Risk
    from ace_learn.evaluate.live import LiveConfig, live_run
    from ace_learn.evaluate.loading import evaluate_policy, replay_exits
    from ace_learn.evaluate.report import write_report
    from ace_learn.models.target import load_target

    dataset, policy = config.output / "dataset", config.output / "policy"
    exits = stages.run("replay", policy / "policy.json", lambda: replay_exits(dataset, policy, "test"))
    target = load_target(build_config(config).target)
    live, latency = stages.run(
        "live",
        policy / "policy.json",
        lambda: live_run(target, dataset, policy, exits.tolist(), LiveConfig(problems=config.live_problems)),
    )
    evaluation = evaluate_policy(
        dataset, policy, risk=Risk(alpha=config.alpha), latency=latency, bootstrap=Bootstrap(seed=config.seed)
    )
    return write_report(config.output, evaluation, live=live, stages=stages.notes, latency=latency)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    run_command(
        DemoConfig,
        run_demo,
        description="The main job on the embedded reasoner: build, train, calibrate, replay, run live, report.",
        argv=argv,
    )

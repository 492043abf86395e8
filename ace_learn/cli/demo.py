"""`python -m ace_learn.demo`: the main job on the embedded reasoner, from problems to a report."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ace_learn.artifacts import (
    JSON,
    LOCK_NAMES,
    dump_config,
    is_temporary,
    read_fields,
    same_config,
    sha256_file,
    sha256_folder,
    write_json,
    write_text,
    writer_lock,
)
from ace_learn.cli.common import run_command

if TYPE_CHECKING:
    from ace_learn.evaluate.calibrate import CalibrateConfig
    from ace_learn.heads.config import TrainConfig
    from ace_learn.labels.build import BuildConfig

Result = TypeVar("Result")

MARK = "demo.json"
"""What makes a folder a demo's; it holds the notes of the stages."""
MADE = ("dataset", "head", "policy", "report.json", "report.md", "report.html", "pareto.png", "config.yaml", MARK)
"""What a demo puts into its folder, and all that it ever deletes there; the mark is the last to go."""


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

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for name in ("train", "validation", "calibration", "test", "live_problems", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.live_problems > self.test:
            raise ValueError(f"live_problems ({self.live_problems}) must not exceed test ({self.test})")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1, not {self.alpha}")


class _Stages:
    """Runs the stages in order and notes, in the folder's mark, what each took and made."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.notes: dict[str, JSON] = read_fields(mark).fields("stages").data

    def run(self, name: str, artifact: Path, work: Callable[[], Result]) -> Result:
        """Runs a stage that is made anew each time."""
        print(f"== {name}", flush=True)
        start = time.monotonic()
        result = work()
        self._note(name, artifact, time.monotonic() - start)
        return result

    def resume(self, name: str, folder: Path, work: Callable[[], object]) -> None:
        """Runs a stage that leaves alone what it finds finished; then its first note stays."""
        print(f"== {name}", flush=True)
        work()
        noted = self.notes.get(name)
        if not isinstance(noted, dict) or noted.get("sha256") != sha256_folder(folder):
            self._note(name, folder, read_fields(folder / "provenance.json").number("wall_seconds"))

    def _note(self, name: str, artifact: Path, seconds: float) -> None:
        digest = sha256_folder(artifact) if artifact.is_dir() else sha256_file(artifact)
        self.notes[name] = {"seconds": round(seconds, 1), "sha256": digest, "artifact": artifact.name}
        write_json(self.mark, {"stages": self.notes})


def run_demo(config: DemoConfig) -> None:
    """Builds, trains, calibrates, replays and runs live; writes the report; checks it.

    Raises:
        ValueError: A stage was refused.
        SystemExit: With status 1, when the report misses a threshold.
    """
    import torch

    from ace_learn.evaluate.calibrate import run_calibration
    from ace_learn.evaluate.report import demo_checks
    from ace_learn.heads.train import train_head
    from ace_learn.labels.build import build_dataset

    torch.set_num_threads(1)  # the reasoner is tiny: threads cost more than they give
    output = config.output
    _refuse_foreign(output)
    with writer_lock(output):
        _claim(config)
        stages = _Stages(output / MARK)
        stages.resume("build", output / "dataset", lambda: build_dataset(build_config(config)))
        stages.resume("train", output / "head", lambda: train_head(train_config(config)))
        calibrated = (output / "policy" / "policy.json").exists()
        stages.resume(
            "calibrate", output / "policy", lambda: None if calibrated else run_calibration(calibrate_config(config))
        )
        report = _report(config, stages)
    print((output / "report.md").read_text(encoding="utf-8"))
    failures = demo_checks(report)
    for failure in failures:
        print(f"MISSED: {failure}", file=sys.stderr)
    if failures and config.check:
        sys.exit(1)


def _refuse_foreign(output: Path) -> None:
    """Leaves a folder alone that holds anything but a demo."""
    if not output.exists():
        return
    entries = [entry for entry in output.iterdir() if entry.name not in LOCK_NAMES]
    foreign = sorted(entry.name for entry in entries if entry.name not in MADE and not _leftover(entry))
    if foreign or (entries and not (output / MARK).is_file()):
        what = f" ({', '.join(foreign[:3])})" if foreign else f" (it has no {MARK})"
        raise ValueError(f"{output} holds something else than a demo{what}; name another --output or empty it")


def _leftover(entry: Path) -> bool:
    """Whether a name is what a killed stage leaves of one of its own."""
    return is_temporary(entry) and any(entry.name.startswith(f"{name}.") for name in MADE)


def _claim(config: DemoConfig) -> None:
    """Makes the folder this demo's: emptied unless it holds an unfinished run of this very recipe."""
    output, recipe = config.output, config.output / "config.yaml"
    for entry in output.iterdir():
        if _leftover(entry):
            _remove(entry)
    unfinished = recipe.exists() and not (output / "report.json").exists()
    if not (unfinished and same_config(config, recipe, ignoring=("output", "check"))):
        for name in MADE:
            _remove(output / name)
        write_json(output / MARK, {"stages": {}})
        write_text(recipe, dump_config(config))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    from ace_learn.evaluate.page import write_page
    from ace_learn.evaluate.report import write_report
    from ace_learn.evaluate.result_page import load_page_data, result_page
    from ace_learn.models.target import load_target

    dataset, head, policy = (config.output / name for name in ("dataset", "head", "policy"))
    exits = stages.run("replay", policy / "policy.json", lambda: replay_exits(dataset, policy, "test"))
    target = load_target(build_config(config).target)
    live_config = LiveConfig(problems=min(config.live_problems, len(exits)))  # some test problems may be excluded
    live, latency = stages.run(
        "live", policy / "policy.json", lambda: live_run(target, dataset, policy, exits.tolist(), live_config)
    )
    evaluation = evaluate_policy(
        dataset, policy, risk=Risk(alpha=config.alpha), latency=latency, bootstrap=Bootstrap(seed=config.seed)
    )
    data = load_page_data(dataset, head, policy, evaluation)
    page = result_page(evaluation, data, live=live, stages=stages.notes, latency=latency, decode=target.decode)
    write_page(config.output / "report.html", page)
    return write_report(config.output, evaluation, live=live, stages=stages.notes, latency=latency)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    run_command(
        DemoConfig,
        run_demo,
        description="The main job on the embedded reasoner: build, train, calibrate, replay, run live, report.",
        argv=argv,
    )

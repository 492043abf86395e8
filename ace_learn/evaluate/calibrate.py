"""The calibrate stage: data set + head -> head folder with a certified `policy.json`."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ace_learn.artifacts import JSON, ProvenanceRecorder, atomic_folder, dump_config, write_json, write_text
from ace_learn.evaluate.calibration import upper_bound
from ace_learn.evaluate.learned import (
    CalibratedPolicy,
    Candidates,
    PolicyFamily,
    Risk,
    build_candidates,
    calibrate_policy,
    threshold_point,
)
from ace_learn.evaluate.loading import open_head
from ace_learn.evaluate.signals import smoothed_signals
from ace_learn.evaluate.traces import Traces, load_traces
from ace_learn.heads.export import CONFIG_NAME, WEIGHTS_NAME

HEAD_FILES = (CONFIG_NAME, WEIGHTS_NAME)
"""What makes a folder a head folder, besides the policy."""


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """What `python -m ace_learn.calibrate` reads."""

    dataset: Path
    """Folder written by build; its validation and calibration splits are used."""
    head: Path
    """Head folder written by train."""
    output: Path
    """New folder: the head with its policy, the certificate and the plot."""
    policy: PolicyFamily = field(default_factory=PolicyFamily)
    """The candidates."""
    risk: Risk = field(default_factory=Risk)
    """What is to be certified."""


class CalibrationSummary(NamedTuple):
    """What the stage found; `explanation` is for the user, above all where the policy is `never`."""

    output: Path
    calibrated: CalibratedPolicy
    explanation: str


def run_calibration(config: CalibrateConfig) -> CalibrationSummary:
    """Fix candidates on the validation split, certify one on the calibration split, write the head folder.

    Prints what was certified, or why nothing was and what would change that.

    Args:
        config: folders, candidates, and what is to be certified.

    Raises:
        ValueError: the output exists, an input is incomplete, the head belongs to another target, or the loss needs
            gold answers that the data set lacks.
        OSError: the disk is full or a path cannot be read or written.
    """
    from ace_learn.evaluate.plots import plot_calibration

    with atomic_folder(config.output) as folder, ProvenanceRecorder() as recorder:
        opened, family = open_head(config.dataset, config.head), config.policy
        # The data set's description holds the hashes of its shards, which have just been compared.
        recorder.start({"dataset": config.dataset / "dataset.json", "head": config.head})
        opened.reader.require(family.signals)
        splits = [load_traces(config.dataset, split) for split in ("validation", "calibration")]
        smoothed = [
            smoothed_signals(opened.reader, traces, ewma=family.ewma, smooth_over=family.smooth_over)
            for traces in splits
        ]
        candidates = build_candidates(family, smoothed[0], splits[0], config.risk)
        calibrated = calibrate_policy(candidates, smoothed[1], splits[1], risk=config.risk, scope=opened.scope)
        accuracy = float(splits[1].full_correct.mean())
        explanation = explain(calibrated, candidates, config.risk, full_accuracy=accuracy)
        for name in HEAD_FILES:
            shutil.copyfile(config.head / name, folder / name)
        write_json(folder / "policy.json", calibrated.policy.to_json())
        write_json(
            folder / "calibration.json", calibration_json(calibrated, candidates, config.risk, splits, explanation)
        )
        write_text(folder / "config.yaml", dump_config(config))
        plot_calibration(folder / "calibration.png", calibrated, config.risk)
        recorder.write(folder)
    print(f"{config.output}: {explanation}")
    return CalibrationSummary(config.output, calibrated, explanation)


def explain(calibrated: CalibratedPolicy, candidates: Candidates, risk: Risk, *, full_accuracy: float) -> str:
    """For the user: what was certified, or why nothing was and what would change that.

    Args:
        calibrated: the outcome.
        candidates: what was tested.
        risk: what was to be certified.
        full_accuracy: of full thinking on the calibration split.
    """
    outcome = _outcome(calibrated, candidates, risk)
    if risk.loss == "lost_correct" and full_accuracy <= risk.alpha:
        return (
            f"{outcome}. Caution: full thinking is right on {full_accuracy:.1%} of the calibration problems, so no "
            "exit can lose more and the level says nothing; calibrate on problems that the model can solve, or for "
            "--risk.loss mismatch"
        )
    return outcome


def _outcome(calibrated: CalibratedPolicy, candidates: Candidates, risk: Risk) -> str:
    result, name = calibrated.result, risk.loss.replace("_", "-")
    if result.chosen is not None:
        bound = upper_bound(int(result.losses[result.chosen]), result.n, 1 - risk.delta)
        kind = "in expectation" if risk.method == "crc" else f"with confidence {1 - risk.delta:.0%}"
        return (
            f"certified {name} <= {risk.alpha:.1%} {kind}: {result.losses[result.chosen]} losses in {result.n} "
            f"calibration problems (upper bound {bound:.2%}), captured savings there "
            f"{calibrated.savings[result.chosen]:.1%}, {len(result.certified)} of {len(candidates.policies)} "
            "candidates certified"
        )
    if not candidates.policies:
        return (
            "the policy is 'never': on the validation split no exit rule saves anything, or every boundary has the "
            "same label (all early answers match, or none does), so there is nothing to learn from"
        )
    return f"the policy is 'never': {result.message}"


def calibration_json(
    calibrated: CalibratedPolicy, candidates: Candidates, risk: Risk, splits: Sequence[Traces], explanation: str
) -> dict[str, JSON]:
    """The content of `calibration.json`: every candidate with its losses, p-value and savings, in test order."""
    result = calibrated.result
    certified = set(result.certified.tolist())
    sequence: list[JSON] = [
        {
            "point": dict(threshold_point(policy)),
            "losses": int(result.losses[i]),
            "risk": float(result.losses[i]) / result.n,
            "p_value": float(result.p_values[i]),
            "captured_savings": float(calibrated.savings[i]),
            "certified": i in certified,
        }
        for i, policy in enumerate(candidates.policies)
    ]
    sizes: dict[str, JSON] = {
        traces.split: {
            "n": traces.num_problems,
            "excluded": traces.excluded,
            "full_accuracy": float(traces.full_correct.mean()),
        }
        for traces in splits
    }
    return {
        "explanation": explanation,
        "loss": risk.loss,
        "alpha": risk.alpha,
        "delta": risk.delta,
        "method": risk.method,
        "order": candidates.order,
        "chosen": result.chosen,
        "splits": sizes,
        "sequence": sequence,
    }

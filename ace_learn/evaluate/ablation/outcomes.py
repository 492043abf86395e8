"""What becomes of a variant: tuned on validation, certified on calibration, replayed on test, kept on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int
from numpy import ndarray

from ace_learn.artifacts import JSON, JsonFields, config_json, read_fields, sha256_json, write_json
from ace_learn.evaluate.ablation.config import FixedPolicy
from ace_learn.evaluate.ablation.variants import Variant
from ace_learn.evaluate.calibrate import explain
from ace_learn.evaluate.compare import Curve, Splits, certified_policies
from ace_learn.evaluate.learned import Risk, Scope, build_candidates, calibrate_policy, policy_exits
from ace_learn.evaluate.loading import OpenedHead, open_head
from ace_learn.evaluate.replay import replay
from ace_learn.evaluate.signals import smoothed_signals
from ace_learn.evaluate.traces import load_traces
from ace_learn.exit.policy import ExitPolicy, SmoothOver

_FORMAT = 1
"""Goes up when the same variant would come out otherwise, so that what older code kept is not taken for it."""


class SmoothedSplits(NamedTuple):
    """Smoothed signals of the traces of each split, nan on padding."""

    validation: Float32[ndarray, "v P S"]
    calibration: Float32[ndarray, "c Q S"]
    test: Float32[ndarray, "n R S"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A variant after tuning.

    Attributes:
        policy: the policy that was chosen, with its certificate; `never` where nothing certifies.
        exit_index: its exit of every test problem.
        curve: test figures along the certificate's grid; no points without a certificate.
        message: what was certified, or why nothing was.
    """

    policy: ExitPolicy
    exit_index: Int[ndarray, " n"]
    curve: Curve
    message: str

    def to_json(self) -> dict[str, JSON]:
        """A JSON object that `from_json` reads."""
        return {
            "policy": self.policy.to_json(),
            "message": self.message,
            "curve": {"tokens_mean": self.curve.tokens_mean.tolist(), "accuracy": self.curve.accuracy.tolist()},
            "exit_index": self.exit_index.tolist(),
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> "Outcome":
        """Read what `to_json` wrote.

        Raises:
            ValueError: a field is missing or wrong.
        """
        curve = fields.fields("curve")
        return cls(
            policy=ExitPolicy.from_json(fields.fields("policy").data),
            exit_index=np.asarray(fields.integers("exit_index"), dtype=np.int64),
            curve=Curve(*(np.asarray(curve.items(name), dtype=np.float64) for name in Curve._fields)),
            message=fields.text("message"),
        )


@dataclass(kw_only=True)
class SignalSource:
    """Signals of every head on the stored traces; each is computed once.

    Attributes:
        dataset: the data set's folder.
        heads: folder of each head.
        splits: the traces.
    """

    dataset: Path
    heads: Mapping[str, Path]
    splits: Splits
    _opened: dict[str, OpenedHead] = field(default_factory=dict)
    _smoothed: dict[tuple[str, float, SmoothOver], SmoothedSplits] = field(default_factory=dict)

    @classmethod
    def open(cls, dataset: Path, heads: Mapping[str, Path]) -> "SignalSource":
        """Read the traces; heads are opened when they are asked for.

        Raises:
            ValueError: the data set is incomplete, or a split of it has no usable trace.
        """
        return cls(dataset=dataset, heads=heads, splits=Splits(*(load_traces(dataset, s) for s in Splits._fields)))

    def opened(self, head: str) -> OpenedHead:
        """A head on the data set's features.

        Raises:
            ValueError: as `open_head`.
        """
        if head not in self._opened:
            self._opened[head] = open_head(self.dataset, self.heads[head])
        return self._opened[head]

    def smoothed(self, head: str, ewma: float, over: SmoothOver) -> SmoothedSplits:
        """A head's smoothed signals on all three splits.

        Raises:
            ValueError: as `smoothed_signals`.
        """
        key = (head, ewma, over)
        if key not in self._smoothed:
            reader = self.opened(head).reader
            self._smoothed[key] = SmoothedSplits(
                *(smoothed_signals(reader, traces, ewma=ewma, smooth_over=over) for traces in self.splits)
            )
        return self._smoothed[key]


def variant_key(variant: Variant, scope: Scope, risk: Risk) -> str:
    """Names all that a variant's outcome depends on."""
    facts: dict[str, JSON] = {
        "format": _FORMAT,
        "data_sha256": scope.data_sha256,
        "head_sha256": scope.head_sha256,
        "fixed": isinstance(variant.policy, FixedPolicy),
        "policy": config_json(variant.policy),
        "risk": config_json(risk),
    }
    return sha256_json(facts)[:16]


def settle(variant: Variant, source: SignalSource, risk: Risk, folder: Path) -> Outcome:
    """The outcome of a variant, from the folder where it was kept, or computed and kept there.

    Raises:
        ValueError: a head or the data set cannot be read, or the loss needs gold answers that the data set lacks.
        OSError: the disk is full or a path cannot be read or written.
    """
    scope = source.opened(variant.head).scope
    path = folder / f"{variant_key(variant, scope, risk)}.json"
    if path.is_file():
        return Outcome.from_json(read_fields(path))
    smoothed = source.smoothed(variant.head, *variant.smoothing)
    outcome = decide(variant, smoothed, source.splits, risk=risk, scope=scope)
    write_json(path, {"name": variant.name, "head": variant.head, **outcome.to_json()})
    return outcome


def decide(variant: Variant, smoothed: SmoothedSplits, splits: Splits, *, risk: Risk, scope: Scope) -> Outcome:
    """Fix candidates on the validation split, certify one on the calibration split, replay it on the test split.

    Args:
        variant: head and policies.
        smoothed: its smoothed signals.
        splits: the traces; labels of the test split decide nothing here.
        risk: what is to be certified.
        scope: what the certificate will hold for.

    Raises:
        ValueError: the loss needs gold answers, and a calibration problem has none.
    """
    if isinstance(variant.policy, FixedPolicy):
        policy, message = variant.policy.policy(), "taken as it is: nothing was tuned, and nothing is certified"
    else:
        candidates = build_candidates(variant.policy, smoothed.validation, splits.validation, risk)
        calibrated = calibrate_policy(candidates, smoothed.calibration, splits.calibration, risk=risk, scope=scope)
        accuracy = float(splits.calibration.full_correct.mean())
        policy, message = calibrated.policy, explain(calibrated, candidates, risk, full_accuracy=accuracy)
    along = replay(splits.test, policy_exits(certified_policies(policy), smoothed.test, splits.test))
    return Outcome(
        policy=policy,
        exit_index=policy_exits([policy], smoothed.test, splits.test)[0],
        curve=Curve(along.tokens.mean(axis=-1), along.correct.mean(axis=-1)),
        message=message,
    )

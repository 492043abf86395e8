"""Exit policies: when a prefix has thought enough, as a predicate on smoothed signals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ace_learn.artifacts import read_fields, sha256_json
from ace_learn.json_type import JSON
from ace_learn.signals import BY_NAME, SIGNALS

Predicate = Literal["all", "any", "score", "never"]
SmoothOver = Literal["tokens", "boundaries"]
Values = TypeVar("Values", Tensor, float)


@dataclass(frozen=True, kw_only=True)
class ScoreModel:
    """A logistic model over smoothed signals, each as its `score_transform` says (`remaining`: log(1 + tokens))."""

    signals: tuple[str, ...]
    weights: tuple[float, ...]
    bias: float
    threshold: float
    """The predicate holds where the modelled probability exceeds this."""

    def __post_init__(self) -> None:
        """Checks names and lengths."""
        _check_signals(self.signals)
        if len(set(self.signals)) != len(self.signals):
            raise ValueError(f"a score model reads each signal once, not {', '.join(self.signals)}")
        if not all(map(math.isfinite, (*self.weights, self.bias, self.threshold))):
            raise ValueError("weights, bias and threshold of a score model must be finite")
        if len(self.weights) != len(self.signals):
            raise ValueError(f"{len(self.weights)} weights for {len(self.signals)} signals; give one weight per signal")

    def probability(self, smoothed: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
        """Probability that exiting here keeps the answer."""
        total = torch.full_like(smoothed[..., 0], self.bias)
        for name, weight in zip(self.signals, self.weights, strict=True):
            total = total + weight * BY_NAME[name].scored(smoothed[..., SIGNALS.index(name)])
        return torch.sigmoid(total)


@dataclass(frozen=True, kw_only=True)
class ExitPolicy:
    """When to end thinking. Certified by `calibrate`; the same object runs in replay and in every engine."""

    predicate: Predicate
    """`all` or `any` of the thresholds, a logistic `score`, or `never`."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Signal -> bound. A signal that `falls` (`remaining`) holds below its bound, the others above theirs."""
    score: ScoreModel | None = None
    ewma: float = 1.0
    """Weight of the newest value in the moving average; 1 switches smoothing off."""
    smooth_over: SmoothOver = "boundaries"
    patience: int = 1
    """Consecutive boundaries at which the predicate must hold."""
    min_thinking_tokens: int = 0
    certificate: dict[str, JSON] | None = None
    """What `calibrate` proved about this policy; None: nothing."""

    def __post_init__(self) -> None:
        """Refuses what no engine could run."""
        if self.predicate not in get_args(Predicate):
            raise ValueError(f"unknown predicate {self.predicate!r}; known: {', '.join(get_args(Predicate))}")
        if self.smooth_over not in get_args(SmoothOver):
            raise ValueError(f"unknown smooth_over {self.smooth_over!r}; known: {', '.join(get_args(SmoothOver))}")
        if not 0.0 < self.ewma <= 1.0:
            raise ValueError(f"ewma must be in (0, 1], not {self.ewma}")
        if self.patience < 1 or self.min_thinking_tokens < 0:
            raise ValueError(
                "patience must be >= 1 and min_thinking_tokens >= 0, not "
                f"{self.patience} and {self.min_thinking_tokens}"
            )
        _check_signals(tuple(self.thresholds))
        if any(not math.isfinite(bound) for bound in self.thresholds.values()):
            raise ValueError(f"thresholds must be finite: {self.thresholds}")
        if self.predicate in ("all", "any") and not self.thresholds:
            raise ValueError(f"predicate {self.predicate!r} needs at least one threshold")
        if (self.predicate == "score") != (self.score is not None):
            raise ValueError("a score model goes with predicate 'score', and only with it")
        if self.thresholds and self.predicate not in ("all", "any"):
            raise ValueError(f"thresholds are not read by predicate {self.predicate!r}; leave them out")

    @classmethod
    def never(cls) -> ExitPolicy:
        """The policy that lets every trace think to its natural end."""
        return cls(predicate="never")

    @classmethod
    def specexit(cls) -> ExitPolicy:
        """The constants published with SpecExit (arXiv 2509.24248, released code)."""
        return cls(
            predicate="all",
            thresholds={"confidence": 0.8, "progress": 0.3, "remaining": 200.0},
            ewma=0.1,
            smooth_over="tokens",
        )

    def holds(self, smoothed: Float[Tensor, "*rows S"]) -> Bool[Tensor, "*rows"]:
        """Whether the predicate holds on smoothed signals. NaN signals never hold."""
        return self.holds_at(smoothed, self.bounds)

    def holds_at(self, smoothed: Float[Tensor, "*rows S"], bounds: Sequence[float | Tensor]) -> Bool[Tensor, "*rows"]:
        """Whether the predicate holds with other bounds than the policy's own.

        Args:
            smoothed: Smoothed signals.
            bounds: In the order of `bounds`; numbers, or tensors that go with [*rows].
        """
        if self.predicate == "never":
            return torch.zeros(smoothed.shape[:-1], dtype=torch.bool, device=smoothed.device)
        if self.score is not None:
            return self.score.probability(smoothed) > bounds[0]
        votes = torch.stack(
            [
                smoothed[..., SIGNALS.index(name)] < bound
                if BY_NAME[name].falls
                else smoothed[..., SIGNALS.index(name)] > bound
                for name, bound in zip(self.thresholds, bounds, strict=True)
            ]
        )
        return votes.all(0) if self.predicate == "all" else votes.any(0)

    @property
    def bounds(self) -> tuple[float, ...]:
        """What the predicate compares with: the thresholds, in their order, or the threshold of the score."""
        return tuple(self.thresholds.values()) if self.score is None else (self.score.threshold,)

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that the predicate reads."""
        return tuple(self.thresholds) if self.score is None else self.score.signals

    def with_certificate(self, certificate: dict[str, JSON]) -> ExitPolicy:
        """This policy with what was proved about it."""
        return replace(self, certificate=certificate)

    def to_json(self) -> dict[str, JSON]:
        """A JSON object that `from_json` reads."""
        score: dict[str, JSON] | None = None
        if self.score is not None:
            score = {
                "signals": list(self.score.signals),
                "weights": list(self.score.weights),
                "bias": self.score.bias,
                "threshold": self.score.threshold,
            }
        rule: dict[str, JSON] = {
            "predicate": self.predicate,
            "thresholds": dict(self.thresholds),
            "score": score,
            "ewma": self.ewma,
            "smooth_over": self.smooth_over,
            "patience": self.patience,
            "min_thinking_tokens": self.min_thinking_tokens,
            "certificate": self.certificate,
        }
        return rule | {"sha256": None if self.certificate is None else sha256_json(rule)}

    @classmethod
    def from_json(cls, data: Mapping[str, JSON]) -> ExitPolicy:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: Unknown or missing keys, or values that no policy can have.
        """
        known = set(cls.never().to_json())
        if set(data) != known:
            raise ValueError(f"not an exit policy: keys {sorted(data)}, expected {sorted(known)}")
        try:
            policy = cls(
                predicate=cast(Predicate, data["predicate"]),
                thresholds=_floats(data["thresholds"]),
                score=_score(data["score"]),
                ewma=_number(data["ewma"]),
                smooth_over=cast(SmoothOver, data["smooth_over"]),
                patience=_whole(data["patience"]),
                min_thinking_tokens=_whole(data["min_thinking_tokens"]),
                certificate=_object_or_none(data["certificate"]),
            )
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"not an exit policy: {error}") from error
        if policy.to_json()["sha256"] != data["sha256"]:
            raise ValueError("the exit policy was changed after it was certified; run calibrate again")
        return policy


def load_policy(head_folder: Path) -> ExitPolicy:
    """Reads the policy of a calibrated head folder.

    Raises:
        ValueError: The folder holds no policy, or a damaged one.
    """
    path = head_folder / "policy.json"
    if not path.is_file():
        raise ValueError(f"{head_folder} holds no policy.json: run `python -m ace_learn.calibrate` first")
    return ExitPolicy.from_json(read_fields(path).data)


def smooth(signals: Float[Tensor, "*batch P S"], ewma: float) -> Float[Tensor, "*batch P S"]:
    """Exponentially weighted moving average along P; the first value initialises it."""
    if ewma == 1.0:
        return signals
    smoothed = [signals[..., 0, :]] if signals.shape[-2] else []
    for step in range(1, signals.shape[-2]):
        smoothed.append(ewma_step(smoothed[-1], signals[..., step, :], ewma))
    return torch.stack(smoothed, dim=-2) if smoothed else signals


def ewma_step(average: Values, value: Values, ewma: float) -> Values:
    """One update of the moving average: the single place of its arithmetic, so that replay and live agree exactly."""
    return ewma * value + (1.0 - ewma) * average


def _check_signals(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in SIGNALS]
    if unknown:
        raise ValueError(
            f"unknown signals {unknown}; known: {', '.join(SIGNALS)}. "
            "A derived signal needs its file in ace_learn/signals"
        )


def _number(value: JSON) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def _whole(value: JSON) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _floats(value: JSON) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return {name: float(_number(bound)) for name, bound in value.items()}


def _object_or_none(value: JSON) -> dict[str, JSON] | None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _score(value: JSON) -> ScoreModel | None:
    data = _object_or_none(value)
    if data is None:
        return None
    signals, weights = data["signals"], data["weights"]
    if not isinstance(signals, list) or not isinstance(weights, list):
        raise TypeError("a score model lists its signals and weights")
    return ScoreModel(
        signals=tuple(str(name) for name in signals),
        weights=tuple(float(_number(weight)) for weight in weights),
        bias=float(_number(data["bias"])),
        threshold=float(_number(data["threshold"])),
    )

"""What the exit rule reads of a policy, for one policy for all requests or for one per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from ace_learn.exit.policy import ExitPolicy, SmoothOver


@runtime_checkable
class ExitRule(Protocol):
    """Smoothing, predicate and limits; each limit one number, or a tensor [B, 1] with one for each request."""

    @property
    def ewma(self) -> float:
        """Weight of the newest value in the moving average."""
        ...

    @property
    def smooth_over(self) -> SmoothOver:
        """Where the moving average moves."""
        ...

    @property
    def patience(self) -> int | Tensor:
        """Consecutive boundaries at which the predicate must hold."""
        ...

    @property
    def min_thinking_tokens(self) -> int | Tensor:
        """No exit before these."""
        ...

    def holds(self, smoothed: Float[Tensor, "*rows S"]) -> Bool[Tensor, "*rows"]:
        """Whether the predicate holds on smoothed signals."""
        ...


@dataclass(frozen=True)
class PolicyRows:
    """Policies of one family, one per request: they differ in bounds, patience and minimum alone."""

    family: ExitPolicy
    bounds: tuple[Float[Tensor, "B 1"], ...]
    """In the order of `ExitPolicy.bounds`."""
    patience: Float[Tensor, "B 1"]
    min_thinking_tokens: Float[Tensor, "B 1"]

    @classmethod
    def unpack(cls, family: ExitPolicy, limits: Float[Tensor, "B L"]) -> PolicyRows:
        """Reads what `limits_of` gave for each request."""
        *bounds, patience, minimum = limits.split(1, dim=1)
        return cls(family, tuple(bounds), patience, minimum)

    @property
    def ewma(self) -> float:
        """The family's."""
        return self.family.ewma

    @property
    def smooth_over(self) -> SmoothOver:
        """The family's."""
        return self.family.smooth_over

    def holds(self, smoothed: Float[Tensor, "B R S"]) -> Bool[Tensor, "B R"]:
        """Whether each request's predicate holds on the smoothed signals of its rows."""
        return self.family.holds_at(smoothed, self.bounds)


def limits_of(policy: ExitPolicy, family: ExitPolicy) -> Sequence[float]:
    """The numbers in which a policy may differ from others of its family: bounds, patience, minimum.

    Raises:
        ValueError: The policy is of another family.
    """
    if _common(policy) != _common(family):
        raise ValueError(
            f"a request may change bounds, patience and minimum of the server's policy, not more: {_common(policy)} "
            f"against {_common(family)}"
        )
    bounds = policy.bounds if policy.score is not None else map(policy.thresholds.__getitem__, family.thresholds)
    return (*bounds, policy.patience, policy.min_thinking_tokens)


def _common(policy: ExitPolicy) -> ExitPolicy:
    """The policy without what may differ within its family."""
    score = None if policy.score is None else replace(policy.score, threshold=0.0)
    thresholds = dict.fromkeys(policy.thresholds, 0.0)
    return replace(policy, thresholds=thresholds, score=score, patience=1, min_thinking_tokens=0, certificate=None)

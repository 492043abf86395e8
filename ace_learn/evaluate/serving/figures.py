"""Figures of a served comparison, with bootstrap intervals over the problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from ace_learn.artifacts import JSON
from ace_learn.evaluate.bootstrap import Interval, percentile_interval
from ace_learn.evaluate.serving.arms import ArmRun

_REPLICATES = 2000
Statistic: TypeAlias = Callable[[Int[ndarray, "R n"]], Float[ndarray, " R"]]
"""From resamples of the problems' places to a figure of each."""


class Estimate(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    interval: Interval

    def to_json(self) -> dict[str, JSON]:
        """A JSON object."""
        return {"value": self.value, "low": self.interval.low, "high": self.interval.high}

    def text(self, digits: int) -> str:
        """The figure and its interval."""
        return f"{self.value:.{digits}f} [{self.interval.low:.{digits}f}, {self.interval.high:.{digits}f}]"


class ArmFigures(NamedTuple):
    """One arm at one concurrency."""

    arm: str
    concurrency: int
    n: int
    exits: float
    """Share of the requests whose thinking the exit rule ended."""
    accuracy: Estimate
    tokens: Estimate
    """Mean output tokens."""
    latency_mean_s: Estimate
    latency_median_s: Estimate
    latency_p95_s: Estimate
    valid_per_s: Estimate
    """Valid answers per second that the server was busy."""

    def to_json(self) -> dict[str, JSON]:
        """A JSON object."""
        return {
            name: value.to_json() if isinstance(value, Estimate) else value for name, value in self._asdict().items()
        }


class Ratios(NamedTuple):
    """Full thinking over one arm, at one concurrency; sums over the same problems."""

    arm: str
    concurrency: int
    tokens: Estimate
    latency: Estimate
    """Of mean latencies."""
    lost: Estimate
    """Accuracy of full thinking less that of the arm."""

    @property
    def share(self) -> float:
        """How much of the saved tokens arrives as saved time: the ratio of latencies over the one of tokens."""
        return self.latency.value / self.tokens.value

    def to_json(self) -> dict[str, JSON]:
        """A JSON object."""
        estimates: dict[str, JSON] = {
            name: value.to_json() if isinstance(value, Estimate) else value for name, value in self._asdict().items()
        }
        return estimates | {"share": self.share}


def figures_of(run: ArmRun) -> ArmFigures:
    """The figures of an arm."""
    seconds, valid = run.column("seconds"), run.valid
    rounds = run.num_requests / len(seconds)
    in_parallel = rounds * float(seconds.sum()) / run.elapsed_s  # mean number of requests under way

    def per_second(places: Int[ndarray, "R n"]) -> Float[ndarray, " R"]:
        answers: Float[ndarray, " R"] = valid[places].sum(1) / (seconds[places].sum(1) / in_parallel)
        return answers

    n = len(seconds)
    return ArmFigures(
        arm=run.arm,
        concurrency=run.concurrency,
        n=n,
        exits=run.exits / run.num_requests,
        accuracy=_estimate(n, _mean(run.right)),
        tokens=_estimate(n, _mean(run.column("tokens"))),
        latency_mean_s=_estimate(n, _mean(seconds)),
        latency_median_s=_estimate(n, _quantile(seconds, 0.5)),
        latency_p95_s=_estimate(n, _quantile(seconds, 0.95)),
        valid_per_s=_estimate(n, per_second),
    )


def ratios_of(full: ArmRun, other: ArmRun) -> Ratios:
    """Full thinking over another arm; both ran the same problems."""
    assert sorted(full.outputs) == sorted(other.outputs), "the arms ran other problems"
    n = len(full.outputs)
    return Ratios(
        arm=other.arm,
        concurrency=other.concurrency,
        tokens=_estimate(n, _ratio(full.column("tokens"), other.column("tokens"))),
        latency=_estimate(n, _ratio(full.column("seconds"), other.column("seconds"))),
        lost=_estimate(n, _mean(full.right - other.right)),
    )


def _estimate(n: int, statistic: Statistic) -> Estimate:
    drawn = np.random.default_rng(0).integers(0, n, (_REPLICATES, n))
    return Estimate(float(statistic(np.arange(n)[None])[0]), percentile_interval(statistic(drawn)))


def _mean(values: Float[ndarray, " n"]) -> Statistic:
    return lambda places: np.asarray(values[places].mean(1))


def _quantile(values: Float[ndarray, " n"], level: float) -> Statistic:
    return lambda places: np.asarray(np.quantile(values[places], level, axis=1))


def _ratio(above: Float[ndarray, " n"], below: Float[ndarray, " n"]) -> Statistic:
    return lambda places: np.asarray(above[places].sum(1) / below[places].sum(1))


def table(figures: Sequence[ArmFigures], ratios: Sequence[Ratios]) -> str:
    """The comparison as Markdown: latencies in seconds, intervals at 95%."""
    lines = [
        "| concurrency | arm | n | exits | accuracy | tokens | mean (s) | median (s) | p95 (s) | valid answers/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {f.concurrency} | {f.arm} | {f.n} | {f.exits:.3f} | {f.accuracy.text(3)} | {f.tokens.text(1)} | "
            f"{f.latency_mean_s.text(3)} | {f.latency_median_s.text(3)} | {f.latency_p95_s.text(3)} | "
            f"{f.valid_per_s.text(2)} |"
            for f in figures
        ),
        "",
        "| concurrency | full over | tokens | mean latency | latency/tokens | accuracy lost |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r.concurrency} | {r.arm} | {r.tokens.text(2)} | {r.latency.text(2)} | {r.share:.2f} | "
            f"{r.lost.text(3)} |"
            for r in ratios
        ),
    ]
    return "\n".join(lines)

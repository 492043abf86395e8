"""Learn-then-Test: choose among candidate exit rules with a finite-sample guarantee on their risk.

The candidates, and the order in which they are tested, must be fixed without looking at the calibration losses. Each
candidate's null hypothesis is "its risk exceeds alpha"; its p-value is the exact tail P(Bin(n, alpha) <= losses).
`fixed_sequence` tests along the order and stops at the first candidate that it cannot reject; `bonferroni` tests all of
them at delta / G. With either, *every* candidate of the certified set has risk <= alpha at once, with probability
>= 1 - delta over the calibration set; so any of them may be picked afterwards, the one that saves most included.
`crc` (conformal risk control) bounds the expected risk only, after making the losses monotone along the order.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.stats import binom, binomtest

from ace_learn.artifacts import JSON, JsonFields

Method = Literal["fixed_sequence", "bonferroni", "crc"]

_MAX_N = 10_000_000
"""Largest calibration set that the advice will name."""


class CalibrationResult(NamedTuple):
    """Outcome of `calibrate`.

    Attributes:
        chosen: index into the sequence, None where nothing certifies.
        certified: indices of all certified candidates, in sequence order.
        losses: summed losses per candidate (monotonised for `crc`).
        p_values: exact binomial p-value per candidate.
        n: size of the calibration set.
        message: one sentence on the outcome; where nothing certifies, what n and what alpha would do.
    """

    chosen: int | None
    certified: Int[ndarray, " C"]
    losses: Int[ndarray, " G"]
    p_values: Float[ndarray, " G"]
    n: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was tested, on what, and with which outcome; it holds for `sampling` alone.

    Attributes:
        method: testing procedure.
        guarantee: what the procedure promises, in words.
        loss: name of the loss.
        n: calibration problems.
        losses: losses of the chosen candidate (made monotone along the order for `crc`).
        alpha: risk level.
        delta: admitted probability that the promise fails.
        p_value: of the chosen candidate.
        chosen: index of the chosen candidate in `grid`.
        certified: indices of all certified candidates.
        grid: every candidate tried, as threshold name -> value, in the order tested.
        grid_order: what fixed the grid and its order.
        data_sha256: hash of the data set.
        head_sha256: hash of the head's weights.
        model_fingerprint: fingerprint of the target.
        sampling: sampling parameters of the probes.
        draft: the drafter's states that the signal `acceptance` was computed from; None: it is not read.
    """

    method: str
    guarantee: str
    loss: str
    n: int
    losses: int
    alpha: float
    delta: float
    p_value: float
    chosen: int
    certified: tuple[int, ...]
    grid: tuple[dict[str, float], ...]
    grid_order: str
    data_sha256: str
    head_sha256: str
    model_fingerprint: str
    sampling: dict[str, JSON]
    draft: dict[str, JSON] | None = None

    def to_json(self) -> dict[str, JSON]:
        """Plain JSON object with the fields under their own names; `draft` only where there is one."""
        plain = {name: value for name, value in asdict(self).items() if name != "draft" or value is not None}
        return {**plain, "certified": list(self.certified), "grid": list(plain["grid"])}

    @classmethod
    def from_json(cls, obj: Mapping[str, JSON]) -> "Certificate":
        """Read what `to_json` wrote.

        Raises:
            ValueError: a field is missing or of the wrong type.
        """
        fields = JsonFields.of(dict(obj), where="certificate")
        grid = tuple(_numbers(JsonFields.of(point, where="certificate grid")) for point in fields.items("grid"))
        return cls(
            method=fields.text("method"),
            guarantee=fields.text("guarantee"),
            loss=fields.text("loss"),
            n=fields.integer("n"),
            losses=fields.integer("losses"),
            alpha=fields.number("alpha"),
            delta=fields.number("delta"),
            p_value=fields.number("p_value"),
            chosen=fields.integer("chosen"),
            certified=fields.integers("certified"),
            grid=grid,
            grid_order=fields.text("grid_order"),
            data_sha256=fields.text("data_sha256"),
            head_sha256=fields.text("head_sha256"),
            model_fingerprint=fields.text("model_fingerprint"),
            sampling=fields.fields("sampling").data,
            draft=fields.fields("draft").data if "draft" in fields.data else None,
        )


def _numbers(fields: JsonFields) -> dict[str, float]:
    return {name: fields.number(name) for name in fields.data}


def check_levels(alpha: float, delta: float) -> None:
    """Refuse levels that mean nothing.

    Raises:
        ValueError: alpha or delta outside (0, 1).
    """
    if not (0 < alpha < 1 and 0 < delta < 1):
        raise ValueError(f"alpha and delta must lie strictly between 0 and 1, got alpha={alpha}, delta={delta}")


def binomial_p_values(losses: Int[ndarray, " G"], n: int, alpha: float) -> Float[ndarray, " G"]:
    """Exact p-values P(Bin(n, alpha) <= losses) of "the risk exceeds alpha"."""
    return np.asarray(binom.cdf(losses, n, alpha), dtype=np.float64)


def upper_bound(losses: int, n: int, confidence: float = 0.95) -> float:
    """One-sided exact (Clopper-Pearson) upper confidence bound of a rate with `losses` events in `n`."""
    test = binomtest(losses, n, alternative="less")
    return float(test.proportion_ci(confidence_level=confidence, method="exact").high)


def calibrate(
    losses: Bool[ndarray, "G n"],
    *,
    alpha: float,
    delta: float,
    method: Method = "fixed_sequence",
    savings: Float[ndarray, " G"] | None = None,
) -> CalibrationResult:
    """Certify candidates on calibration losses and choose the certified one that saves most.

    Args:
        losses: loss of each candidate on each calibration problem, candidates in the order of the fixed sequence.
        alpha: risk level, in (0, 1).
        delta: admitted probability that a certified candidate's risk exceeds alpha, in (0, 1); unused by `crc`.
        method: testing procedure.
        savings: what each candidate saves; without it, candidates are taken to save more along the sequence.
            A certified candidate that saves nothing is not chosen.

    Raises:
        ValueError: a level outside (0, 1), or no calibration problem.
    """
    check_levels(alpha, delta)
    if losses.shape[1] == 0:
        raise ValueError("the calibration split holds no problem: build more problems for it")
    n = losses.shape[1]
    worth = np.arange(1.0, losses.shape[0] + 1) if savings is None else savings
    counted = np.logical_or.accumulate(losses, axis=0) if method == "crc" else losses
    sums = np.asarray(np.sum(counted, axis=1, dtype=np.int64))
    p_values = binomial_p_values(sums, n, alpha)
    certified = np.flatnonzero(_certifies(sums, p_values, n, alpha=alpha, delta=delta, method=method))
    useful = certified[worth[certified] > 0]
    chosen = int(useful[np.argmax(worth[useful])]) if useful.size else None
    rejected = np.setdiff1d(np.arange(losses.shape[0]), certified)
    if chosen is not None:
        message = f"candidate {chosen} of {losses.shape[0]}: {sums[chosen]} losses in {n} calibration problems"
    elif rejected.size == 0:
        message = "no candidate saves anything" if losses.shape[0] else "there is no candidate to certify"
    else:
        next_up = int(rejected[np.argmin(sums[rejected])]) if method == "bonferroni" else int(rejected[0])
        level = delta / losses.shape[0] if method == "bonferroni" else delta
        message = _advice(int(sums[next_up]), n, alpha=alpha, level=level, method=method)
    return CalibrationResult(chosen, certified, sums, p_values, n, message)


def _certifies(
    sums: Int[ndarray, " G"],
    p_values: Float[ndarray, " G"],
    n: int,
    *,
    alpha: float,
    delta: float,
    method: Method,
) -> Bool[ndarray, " G"]:
    match method:
        case "fixed_sequence":
            return np.asarray(np.logical_and.accumulate(p_values <= delta))
        case "bonferroni":
            return np.asarray(p_values <= delta / max(1, p_values.shape[0]))
        case "crc":
            return np.asarray((sums + 1) / (n + 1) <= alpha)


def _advice(losses: int, n: int, *, alpha: float, level: float, method: Method) -> str:
    """Say what alpha, and what n at the same loss rate, would certify a candidate with these losses."""
    if method == "crc":
        alpha_needed = (losses + 1) / (n + 1)
        gap = alpha - losses / n
        n_needed = math.ceil((1 - alpha) / gap - 1e-9) if gap > 0 else None
    else:
        alpha_needed = upper_bound(losses, n, 1 - level)
        n_needed = _smallest_n(losses / n, alpha, level)
    with_n = (
        f"about {n_needed} calibration problems at the same loss rate"
        if n_needed is not None
        else f"no number of problems at this loss rate ({losses / n:.2%})"
    )
    return (
        f"nothing certifies: {losses} losses in {n} calibration problems at alpha={alpha:g}, level {level:g}; "
        f"it would take alpha >= {math.ceil(alpha_needed * 1e4) / 1e4:g} with these problems, or {with_n}"
    )


def _smallest_n(rate: float, alpha: float, level: float) -> int | None:
    """Smallest n (to the precision of a bisection) whose exact p-value at this loss rate is at most `level`."""

    def passes(n: int) -> bool:
        return float(binom.cdf(math.ceil(rate * n - 1e-9), n, alpha)) <= level

    high = 1
    while not passes(high):
        high *= 2
        if high > _MAX_N:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high

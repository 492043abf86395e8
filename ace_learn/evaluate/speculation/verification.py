"""Fixed draft lengths against adaptive verification, over concurrency: decoded here, and simulated for a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.artifacts import JSON, ProvenanceRecorder, write_json, write_text
from ace_learn.engines.costs import measure_costs
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.speculation.events import Steps, collect
from ace_learn.evaluate.speculation.predictors import Events, fit
from ace_learn.evaluate.speculation.setting import Pair, SpeculationSetting
from ace_learn.speculation.adaptive import AdaptiveVerifier, CostTables
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator
from ace_learn.speculation.simulator import Machine, Pool, simulate


@dataclass(frozen=True, kw_only=True)
class VerificationSweep:
    """A recipe of `python -m ace_learn.bench verification`."""

    setting: SpeculationSetting = SpeculationSetting()
    """Target, drafter and problems; its K is that of adaptive verification."""
    fixed: list[int] = field(default_factory=lambda: [0, 1, 2, 4])
    """Fixed draft lengths to compare with; 0: no speculation."""
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16, 32])
    """Running requests, decoded here."""
    problems: int = 32
    """Problems of each cell, at most 8 times the concurrency."""
    temperature: float = 1.0
    """Sampling temperature."""
    simulated: list[int] = field(default_factory=lambda: [1, 4, 16, 64, 256])
    """Running requests, simulated."""
    machine: Machine = Machine()
    """The simulated machine."""
    simulated_steps: int = 600
    """Verify steps of each simulated cell."""
    output: Path | None = None
    """Folder for table.md, results.json and plot.png."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if min(self.problems, self.simulated_steps, *self.concurrency, *self.simulated) < 1 or self.temperature <= 0.0:
            raise ValueError("need problems, steps and concurrency >= 1 and a temperature > 0")
        if min(self.fixed, default=0) < 0 or max(self.fixed, default=0) > self.setting.draft_tokens:
            raise ValueError(f"fixed draft lengths must be between 0 and {self.setting.draft_tokens}, not {self.fixed}")


def sweep_verification(config: VerificationSweep) -> dict[str, JSON]:
    """Runs every cell; prints, returns and optionally writes the tables.

    Raises:
        ValueError: A model cannot be loaded.
    """
    with ProvenanceRecorder() as recorder:
        pair = Pair(config.setting)
        _, requests = pair.problems(config.problems)
        steps, _ = collect(pair, requests, temperature=config.temperature, batch_size=min(64, max(config.concurrency)))
        decoded = _decoded(pair, requests, config)
        simulated = _simulated(pool_of(steps), config)
        results: dict[str, JSON] = {"decoded": _json(decoded), "simulated": _json(simulated)}
        text = "\n\n".join(
            (
                _table("tokens per second, decoded here", decoded),
                _table("tokens per second, simulated", simulated),
            )
        )
        print(text)
        if config.output is not None:
            from ace_learn.evaluate.speculation.plots import plot_throughput

            write_text(config.output / "table.md", text + "\n")
            write_json(config.output / "results.json", results)
            plot_throughput(config.output / "plot.png", {"decoded here": decoded, "simulated": simulated})
            recorder.write(config.output)
    return results


Throughput = dict[int, dict[str, float]]
"""Tokens per second by concurrency and method."""


def pool_of(steps: Steps) -> Pool:
    """Measured drafts with the fit of what was accepted of them."""
    row, position = np.nonzero(steps.judged())
    log_odds = steps.features[:, :, 0].astype(np.float64)
    model = fit(log_odds[row, position], Events(position, steps.labels()[row, position]), log_odds.shape[1])
    whole = steps.drafted == log_odds.shape[1]
    return Pool(features=log_odds[whole], slope=model.slope, intercepts=model.intercepts)


def _decoded(pair: Pair, requests: Sequence[Request], config: VerificationSweep) -> Throughput:
    found: Throughput = {}
    for concurrency in config.concurrency:
        asked = requests[: 8 * concurrency]
        cell = {f"K = {k}": _speed(pair, asked, config, concurrency, draft_tokens=k) for k in config.fixed}
        width = pair.setting.draft_tokens
        drafter = pair.drafter(Sampling(temperature=config.temperature, seed=config.setting.seed))
        costs = measure_costs(pair.target, drafter, batch_size=concurrency, draft_tokens=width)
        cell[f"K = {width}"] = _speed(pair, asked, config, concurrency, draft_tokens=width)
        cell[f"adaptive, K = {width}"] = _speed(pair, asked, config, concurrency, draft_tokens=width, costs=costs)
        found[concurrency] = cell
    return found


def _speed(
    pair: Pair,
    requests: Sequence[Request],
    config: VerificationSweep,
    concurrency: int,
    *,
    draft_tokens: int,
    costs: CostTables | None = None,
) -> float:
    """Tokens per second of processor time on a CPU, of elapsed time on a GPU."""
    verifier = None
    if costs is not None:
        estimator = OnlineAcceptanceEstimator(draft_tokens, refit_interval=20, device=pair.target.device)
        verifier = AdaptiveVerifier(estimator=estimator, costs=costs)
    sampling = Sampling(temperature=config.temperature, seed=config.setting.seed)
    engine = pair.engine(sampling, verifier=verifier, batch_size=concurrency, draft_tokens=draft_tokens)
    clock = time.process_time if pair.target.device.type == "cpu" else time.perf_counter
    start = clock()
    outputs = engine.generate(requests)
    return sum(len(output.token_ids) for output in outputs) / (clock() - start)


def _simulated(pool: Pool, config: VerificationSweep) -> Throughput:
    width = config.setting.draft_tokens
    methods = {f"K = {k}": (k, False) for k in (*config.fixed, width)} | {f"adaptive, K = {width}": (width, True)}
    return {
        requests: {
            name: simulate(
                pool, config.machine, requests=requests, draft_tokens=k, adaptive=adaptive, steps=config.simulated_steps
            )
            for name, (k, adaptive) in methods.items()
        }
        for requests in config.simulated
    }


def _json(found: Throughput) -> JSON:
    return {str(requests): dict[str, JSON](cell) for requests, cell in found.items()}


def _table(title: str, found: Throughput) -> str:
    names = list(next(iter(found.values())))
    lines = [f"| {title}, at concurrency | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for requests, cell in found.items():
        best = max(cell.values())
        shown = [f"**{value:,.0f}**" if value == best else f"{value:,.0f}" for value in cell.values()]
        lines.append(f"| {requests} | {' | '.join(shown)} |")
    return "\n".join(lines)


def series_of(found: Mapping[int, Mapping[str, float]], name: str) -> Float[ndarray, " n"]:
    """Throughput of one method, relative to decoding with the shortest fixed length."""
    return np.array([cell[name] / next(iter(cell.values())) for cell in found.values()])

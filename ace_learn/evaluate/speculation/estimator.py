"""What the acceptance estimator and adaptive verification add to a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ace_learn.artifacts import JSON
from ace_learn.speculation.adaptive import CostTables, allocate, choose_budget
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator, log_odds
from ace_learn.speculation.rules import cactus_target


@dataclass(frozen=True, kw_only=True)
class EstimatorBenchmark:
    """A recipe of `python -m ace_learn.bench estimator`."""

    requests: int = 64
    """Running requests, B."""
    draft_tokens: int = 8
    """Draft length, K."""
    vocabulary: int = 4096
    """Vocabulary of the feature and of the rule, V."""
    steps: int = 200
    """Steps to time."""
    device: str = "cpu"
    """Where the tensors live."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        if min(self.requests, self.draft_tokens, self.vocabulary, self.steps) < 1:
            raise ValueError("requests, draft_tokens, vocabulary and steps must be >= 1")


def benchmark_estimator(config: EstimatorBenchmark) -> dict[str, JSON]:
    """Prints and returns the median microseconds of each part of a step."""
    device, (batch, width) = torch.device(config.device), (config.requests, config.draft_tokens)
    draw = torch.Generator().manual_seed(0)
    features = (torch.randn(batch, width, generator=draw) * 2).to(device)
    logits = torch.randn(batch, config.vocabulary, generator=draw).to(device)
    drafted = torch.full((batch,), width, device=device)
    accepted = torch.randint(0, width + 1, (batch,), generator=draw).to(device)
    mask = torch.ones(batch, width, dtype=torch.bool, device=device)
    estimator = OnlineAcceptanceEstimator(width, device=device)
    predicted = estimator.predict(features)
    scores, counts = predicted.cpu().double().numpy(), np.full(batch, width)
    tokens = batch * (width + 1)
    costs = CostTables(draft=np.full(batch + 1, 1.0), verify=10.0 + 0.02 * np.arange(tokens + 1))
    one_row, first = logits.softmax(-1), logits.argmax(-1)
    parts: dict[str, Callable[[], object]] = {
        "predict": partial(estimator.predict, features),
        "observe, a refit every 100 steps included": partial(estimator.observe, features, accepted, drafted, mask),
        "observe with quality figures": partial(
            OnlineAcceptanceEstimator(width, device=device, quality=True).observe, features, accepted, drafted, mask
        ),
        "refit": partial(OnlineAcceptanceEstimator(width, device=device).refit),
        "allocate": partial(allocate, predicted, drafted, batch * width // 2),
        "budget (host)": partial(choose_budget, scores, counts, costs),
        f"feature of one draft position, V = {config.vocabulary}": partial(log_odds, logits),
        f"cactus_exact of one draft position, V = {config.vocabulary}": partial(
            cactus_target, one_row, first, 0.5, True
        ),
    }
    print(f"microseconds per step at B = {batch}, K = {width}, on {device}")
    figures: dict[str, JSON] = {}
    for name, work in parts.items():
        figures[name] = _microseconds(work, config.steps, device)
        print(f"{figures[name]:>10.1f}  {name}", flush=True)
    return figures


def _microseconds(work: Callable[[], object], steps: int, device: torch.device) -> float:
    """Median of groups of calls, so that a device's queue is measured and not its launches alone."""
    group = max(1, steps // 10)
    times = []
    for _ in range(11):
        start = time.perf_counter()
        for _ in range(group):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e6 * (time.perf_counter() - start) / group)
    return statistics.median(times[1:])

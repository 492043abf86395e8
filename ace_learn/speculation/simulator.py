"""Adaptive verification on batches and machines that are not here.

What is assumed:

- Every request decodes without end. Each step it has K drafts, whose log-odds f are a row drawn at random from a pool
  of measured rows; rows follow each other without memory, which real text does not.
- A draft behind accepted ones is accepted with the probability that the pool's own logistic fit gives it, and the
  estimator of the simulated engine starts from common coefficients and must find that fit.
- A step costs `draft_step` per drafted position plus verification: reading the weights or computing, whichever is
  longer, max(memory, tokens x compute), plus a fixed overhead. Attention over the context, sampling, scheduling and
  prefill cost nothing, and the batch is ragged: a step computes the tokens that it verifies and no padding.
- Nothing is padded to captured graph sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from ace_learn.speculation.adaptive import CostTables, allocate, choose_budget
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Costs of a step, milliseconds.

    The defaults are a 4B model in bf16 on a GPU that reaches 4 TB/s and 400 TFLOP/s: 8 GB are read in 2 ms, and the
    8 GFLOP of a token are computed in 0.02 ms.
    """

    memory: float = 2.0
    """Reading the weights once."""
    compute: float = 0.02
    """Computing one token."""
    overhead: float = 0.5
    """Of every step."""
    draft_step: float = 0.15
    """One drafted position of all requests together."""

    def __post_init__(self) -> None:
        """Checks that a step costs something."""
        if min(self.memory, self.compute, self.overhead, self.draft_step) < 0.0 or self.memory + self.compute <= 0.0:
            raise ValueError("costs must not be negative, and a step must cost something")

    def costs(self, requests: int, draft_tokens: int) -> CostTables:
        """The tables that the simulated engine would measure."""
        tokens = np.arange(requests * (draft_tokens + 1) + 1, dtype=np.float64)
        verify = self.overhead + np.maximum(self.memory, self.compute * tokens)
        return CostTables(draft=np.full(requests + 1, self.draft_step * draft_tokens), verify=verify)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where simulated drafts come from."""

    features: Float[ndarray, "n K"]
    """Log-odds of the drafts of measured steps."""
    slope: float
    """Of the fit that decides what is accepted."""
    intercepts: Float[ndarray, " K"]
    """Of the same fit."""


def simulate(
    pool: Pool, machine: Machine, *, requests: int, draft_tokens: int, adaptive: bool, steps: int, seed: int = 0
) -> float:
    """Tokens per second of a batch, over the second half of the steps.

    Args:
        pool: Drafts.
        machine: Costs.
        requests: Running requests, B.
        draft_tokens: K; 0 decodes without speculation.
        adaptive: Trim the drafts; else all K are verified.
        steps: Verify steps.
        seed: Of the draws.
    """
    draw = np.random.default_rng(seed)
    costs = machine.costs(requests, draft_tokens)
    estimator = OnlineAcceptanceEstimator(max(1, draft_tokens), refit_interval=20)
    stale = np.ones((requests, draft_tokens))
    full = np.full(requests, draft_tokens)
    tokens = milliseconds = 0.0
    for step in range(steps):
        features = pool.features[draw.integers(0, len(pool.features), requests), :draft_tokens]
        law = 1.0 / (1.0 + np.exp(-(pool.slope * features + pool.intercepts[:draft_tokens])))
        accepts = draw.random(law.shape) < law
        verified = full
        if adaptive:
            scored = torch.from_numpy(features).float()
            predicted = estimator.predict(scored)
            budget = choose_budget(stale, full, costs)
            verified = allocate(predicted, torch.from_numpy(full), budget).numpy()
            stale = predicted.double().numpy()  # noise is fresh in every step here, so that all of it may be kept
        accepted = np.minimum(accepts.cumprod(axis=1).sum(axis=1), verified) if draft_tokens else full
        if adaptive:
            estimator.observe(
                torch.from_numpy(features).float(), torch.from_numpy(accepted), torch.from_numpy(verified)
            )
        if step >= steps // 2:
            tokens += requests + float(accepted.sum())
            milliseconds += float(costs.draft[requests] + costs.verify[requests + int(verified.sum())])
    return 1e3 * tokens / milliseconds

"""Adaptive verification: as many drafts are verified as pay for themselves, the likeliest of the whole batch.

The next k drafts of a request all survive with probability a_1 ... a_k, and a step emits one token per request besides.
The budget of a step maximises expected tokens over cost; the globally likeliest slots get it (vLLM PR #47808).

Two things keep it lossless. The features score the law that a draft is drawn from, never the draft. And the budget
comes from scores of the step before: the current score of a slot depends on the drafts in front of it, so that a budget
taken from current scores would decide whether a draft is verified by looking at that draft. Current scores may rank
slots, since survival never rises along a request: what stands behind a draft cannot push it out.

Noise that is keyed by position needs a third rule. Drafts behind a rejected one were drawn with the noise that the next
step draws from again, and the scores behind them tell of it. Such scores are not kept (`fresh_scores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from ace_learn.speculation.drafters import Drafts
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator, law_log_odds


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Whether to verify only the drafts that are likely to be accepted."""

    enabled: bool = False
    """Trim drafts by predicted acceptance and measured costs; needs a drafter with probabilities."""
    forgetting: float = 0.0
    """Share of its sums that the estimator keeps at a refit: 0 follows traffic at once, near 1 is steady."""
    separate_answer: bool = False
    """Give answer text intercepts of its own."""
    coefficients: Path | None = None
    """File of an estimator to start from (`OnlineAcceptanceEstimator.save`); none: common starting values."""

    def __post_init__(self) -> None:
        """Checks the values, and refuses what would be ignored."""
        settings = {"forgetting": 0.0, "separate_answer": False, "coefficients": None}
        given = [name for name, default in settings.items() if getattr(self, name) != default]
        if given and not self.enabled:
            raise ValueError(f"{', '.join(given)} would be ignored; set adaptive.enabled: true or leave it out")
        if self.coefficients is not None and len(given) > 1:
            raise ValueError("a file of coefficients has its own forgetting and separate_answer; leave those out")
        if not 0.0 <= self.forgetting <= 1.0:
            raise ValueError(f"forgetting must be between 0 and 1, not {self.forgetting}")

    def estimator(self, draft_tokens: int, device: torch.device) -> OnlineAcceptanceEstimator:
        """The estimator to start with.

        Raises:
            ValueError: The file holds none, or one for another draft length.
            OSError: The file cannot be read.
        """
        if self.coefficients is None:
            return OnlineAcceptanceEstimator(
                draft_tokens,
                forgetting=self.forgetting,
                separate_answer=self.separate_answer,
                halve_slope=True,
                device=device,
            )
        loaded = OnlineAcceptanceEstimator.load(self.coefficients, device=device)
        if loaded.num_positions != draft_tokens:
            raise ValueError(
                f"{self.coefficients} is for {loaded.num_positions} draft tokens, not {draft_tokens}; name another file"
            )
        return loaded


@dataclass(frozen=True, kw_only=True)
class CostTables:
    """Milliseconds of the two halves of a step, by size."""

    draft: Float[ndarray, " N"]
    """Of drafting, by number of requests."""
    verify: Float[ndarray, " M"]
    """Of the target's forward, by number of tokens."""
    padded: bool = False
    """The engine runs every request's row to the longest one, so that a step costs requests x longest tokens."""

    def __post_init__(self) -> None:
        """Checks that costs are finite and that a verify step costs something."""
        finite = bool(np.isfinite(self.draft).all() and np.isfinite(self.verify).all())
        if not (finite and len(self.draft) and len(self.verify) > 1 and self.verify[1:].min(initial=np.inf) > 0):
            raise ValueError("cost tables must be finite, and verifying a token must cost something; measure them anew")

    @classmethod
    def from_curves(
        cls,
        draft: Sequence[tuple[int, float]],
        verify: Sequence[tuple[int, float]],
        *,
        most_requests: int,
        most_tokens: int,
        padded: bool = False,
    ) -> CostTables:
        """Tables from measured (size, milliseconds) points, made monotone.

        Between points the cost is linear; beyond the last two it goes on as between them.
        """
        return cls(draft=_table(draft, most_requests), verify=_table(verify, most_tokens), padded=padded)


def _table(points: Sequence[tuple[int, float]], limit: int) -> Float[ndarray, " N"]:
    sizes, costs = np.array(sorted(points), dtype=np.float64).T
    costs = np.maximum.accumulate(costs)
    values = np.arange(limit + 1, dtype=np.float64)
    table = np.interp(values, sizes, costs)
    if len(sizes) > 1:
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
        table = np.where(values > sizes[-1], costs[-1] + slope * (values - sizes[-1]), table)
    return np.asarray(table)


def choose_budget(scores: Float[ndarray, "B K"], num_drafted: Int[ndarray, " B"], costs: CostTables) -> int:
    """How many drafts of the batch to verify: argmax (requests + sum of the best survivals) / (draft + verify cost).

    Args:
        scores: Acceptance predicted for each draft slot, from the step before (`fresh_scores`); 1 for a new request.
        num_drafted: Drafts of each request in this step.
        costs: What steps cost.
    """
    batch, width = scores.shape
    survival = scores.cumprod(axis=1)
    real = np.arange(width) < num_drafted[:, None]
    order = np.argsort(-survival[real], kind="stable")
    best, column = survival[real][order], np.nonzero(real)[1][order]
    emitted = batch + np.concatenate(([0.0], best.cumsum()))
    if costs.padded:
        longest = np.concatenate(([0], np.maximum.accumulate(column + 1)))
        tokens = batch * (1 + longest)
    else:
        tokens = batch + np.arange(len(best) + 1)
    return int(np.argmax(emitted / (costs.draft[batch] + costs.verify[tokens])))


def allocate(predicted: Float[Tensor, "B K"], num_drafted: Int[Tensor, " B"], budget: int) -> Int[Tensor, " B"]:
    """Verified drafts of each request when the `budget` likeliest slots of the batch are admitted; no host sync.

    Survival never rises along a request, so that the winners of a request are a prefix of its drafts.
    """
    real = torch.arange(predicted.shape[1], device=predicted.device) < num_drafted[:, None]
    survival = predicted.double().cumprod(1).masked_fill(~real, -1.0)
    best = survival.flatten().topk(min(budget, survival.numel())).indices
    won = torch.zeros(survival.numel(), dtype=torch.bool, device=predicted.device).index_fill(0, best, True)
    return torch.minimum(won.view(real.shape).sum(1), num_drafted)


def fresh_scores(predicted: Float[Tensor, "B K"], num_decided: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """What of a step's predictions may choose the next step's budget, where noise is keyed by position.

    The score of slot k tells of the k drafts in front of it. While those stand at positions that the step has decided,
    their noise is never drawn again. The slots behind take the last such score.

    Args:
        predicted: Acceptance predicted for each draft slot.
        num_decided: Tokens that the step added to each request: its accepted drafts and one more.
    """
    last = num_decided.clamp(max=predicted.shape[1] - 1)[:, None]
    column = torch.arange(predicted.shape[1], device=predicted.device)
    return torch.where(column <= last, predicted, predicted.gather(1, last))


@dataclass(frozen=True, kw_only=True)
class AdaptiveVerifier:
    """Trims drafts before they are verified."""

    estimator: OnlineAcceptanceEstimator
    costs: CostTables | None
    """None: nothing is trimmed, and the estimator only watches."""

    def start(self, num_requests: int) -> VerificationSession:
        """The scores of a new batch."""
        return VerificationSession(self, num_requests)


class VerificationSession:
    """Scores of the running requests of one batch; rows of arguments are `requests`, by their index in the batch."""

    def __init__(self, verifier: AdaptiveVerifier, num_requests: int) -> None:
        """Nothing is known of any request: everything is admitted."""
        self.verifier = verifier
        self._stale = np.ones((num_requests, verifier.estimator.num_positions))
        self._features: Float[Tensor, "B K"] | None = None

    def admit(self, drafts: Drafts, requests: Sequence[int], thinking: Bool[Tensor, " B"]) -> Drafts:
        """The drafts to verify.

        Raises:
            ValueError: The drafter gives no probabilities.
        """
        self._features = None
        width = drafts.tokens.shape[1]
        if width == 0:
            return drafts
        if drafts.probabilities is None:
            raise ValueError(
                "acceptance is predicted from draft probabilities, which this drafter does not give; use a model that "
                "drafts at a temperature above 0, or leave adaptive verification out"
            )
        estimator = self.verifier.estimator
        features = law_log_odds(drafts.probabilities)
        missing = estimator.num_positions - width
        self._features = torch.nn.functional.pad(features, (0, missing))
        self._thinking = thinking if estimator.separate_answer else None
        self._predicted = estimator.predict(self._features, self._thinking)
        if self.verifier.costs is None:
            return drafts
        counts = drafts.num_drafted.cpu().numpy()
        stale = self._stale[list(requests)][:, :width]
        budget = choose_budget(stale, counts, self.verifier.costs)
        if budget >= counts.sum():
            return drafts
        kept = allocate(self._predicted[:, :width], drafts.num_drafted, budget)
        longest = int(kept.max())
        probabilities = drafts.probabilities[:, :longest]
        return drafts._replace(tokens=drafts.tokens[:, :longest], num_drafted=kept, probabilities=probabilities)

    def observe(
        self, num_accepted: Int[Tensor, " B"], num_verified: Int[Tensor, " B"], judged: Bool[Tensor, "B K"]
    ) -> None:
        """Learns from what the target said of the drafts of the last `admit`.

        Args:
            num_accepted: Accepted drafts.
            num_verified: Drafts that were verified.
            judged: Drafts that the target judged freely; a forced row is no label.
        """
        if self._features is None:
            return
        mask = torch.nn.functional.pad(judged, (0, self._features.shape[1] - judged.shape[1]))
        self.verifier.estimator.observe(self._features, num_accepted, num_verified, mask, self._thinking)

    def keep(self, requests: Sequence[int], num_decided: Sequence[int]) -> None:
        """Keeps the scores that may choose the next budget.

        Args:
            requests: As in `admit`.
            num_decided: Tokens that the step added to each request.
        """
        if self._features is not None:
            decided = torch.tensor(num_decided, device=self._predicted.device)
            self._stale[list(requests)] = fresh_scores(self._predicted, decided).cpu().numpy()

"""Predicts which drafts the target will accept, and calibrates itself on what it did accept.

The law of the draft is scored, never the token drawn from it: f = logit(max p). Acceptance of draft k is
a_k = sigmoid(w f + b_k), a logistic regression with one slope and an intercept per position, fitted online by one
damped Newton step per round of sums. This is the estimator of vLLM (PR #52228), in batched torch and with what it
lacks: forgetting, intercepts of their own for answer text, masks, save and restore, and running quality figures.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ace_learn.artifacts import JsonFields, write_bytes
from ace_learn.speculation.quality import AcceptanceQuality

MAX_LOG_ODDS = 40.0
"""A law with all its mass on one token has infinite log-odds."""
INITIAL_SLOPE, INITIAL_INTERCEPT = 0.5, -0.2
DAMPING_OBSERVATIONS = 50.0
"""A parameter seen this often in a round moves by half a Newton step."""
L2 = 1e-3
"""Ridge on the Hessian alone: it damps steps, and leaves the optimum where it is."""


def log_odds(logits: Float[Tensor, "*rows V"], temperature: float = 1.0) -> Float[Tensor, "*rows"]:
    """The feature f = logit(max p) = -log(sum of the others' exp(l - l_max)), clamped to +-40.

    Args:
        logits: The drafter's.
        temperature: What the drafter samples with; 0 counts as 1, since a greedy drafter's law is that of its logits.
    """
    scaled = logits.float() / (temperature if temperature > 0.0 else 1.0)
    top = scaled.max(-1, keepdim=True)
    others = (
        (scaled - top.values).exp_().scatter_(-1, top.indices, 0.0)
    )  # summed without the mode, which loses no digit
    return (-others.sum(-1).log()).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def law_log_odds(law: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """The feature f of drafters that give probabilities: those that they draw from, truncated or not."""
    return log_odds(law.clamp_min(1e-38).log())


class _Sums(NamedTuple):
    """Weighted sums of a round, W = a (1 - a): Hessian and gradient of the log-likelihood. G = intercepts."""

    hessian_slope: Float[Tensor, ""]
    hessian_cross: Float[Tensor, " G"]
    hessian_intercepts: Float[Tensor, " G"]
    gradient_slope: Float[Tensor, ""]
    gradient_intercepts: Float[Tensor, " G"]
    counts: Float[Tensor, " G"]

    @classmethod
    def zeros(cls, groups: int, device: torch.device) -> _Sums:
        one, each = torch.zeros((), device=device), torch.zeros(groups, device=device)
        return cls(one, each, each, one, each, each)


class OnlineAcceptanceEstimator:
    """A logistic regression on draft confidence that follows the traffic.

    Predictions are those of the coefficients at the time of the call; they move only in `observe`. Neither of the two
    waits for the device.

    Attributes:
        num_positions: K.
        intercepts_per_position: 1, or 2 where answer text has intercepts of its own.
        quality: Running AUC, log-loss and ECE of the predictions; None if not asked for.
    """

    def __init__(
        self,
        num_positions: int,
        *,
        refit_interval: int = 100,
        forgetting: float = 0.0,
        separate_answer: bool = False,
        halve_slope: bool = False,
        device: torch.device | str = "cpu",
        quality: bool = False,
    ) -> None:
        """Starts from coefficients that suit many model pairs.

        Args:
            num_positions: Draft length, K.
            refit_interval: Calls of `observe` between two Newton steps.
            forgetting: Share of a round's sums that the next one starts with: 0 clears them, as vLLM does; 1 forgets
                nothing. Sums that are kept are moved to the new coefficients (second order).
            separate_answer: Give answer text intercepts of its own; the slope stays common.
            halve_slope: Where a step would turn the slope negative, halve it instead of leaving it. A slope that is far
                too high makes every step overshoot; vLLM leaves it, and it then never comes down.
            device: Where the coefficients live.
            quality: Keep running quality figures.

        Raises:
            ValueError: A number is out of range.
        """
        if num_positions < 1 or refit_interval < 1 or not 0.0 <= forgetting <= 1.0:
            raise ValueError(
                "need num_positions >= 1, refit_interval >= 1 and 0 <= forgetting <= 1, not "
                f"{num_positions}, {refit_interval} and {forgetting}"
            )
        self.num_positions, self.refit_interval, self.forgetting = num_positions, refit_interval, forgetting
        self.separate_answer, self.halve_slope = separate_answer, halve_slope
        self.device = torch.device(device)
        groups = num_positions * (2 if separate_answer else 1)
        self._slope = torch.full((), INITIAL_SLOPE, device=self.device)
        self._intercepts = torch.full((groups,), INITIAL_INTERCEPT, device=self.device)
        self._sums = _Sums.zeros(groups, self.device)
        self._since_refit = 0
        self.quality = AcceptanceQuality(self.device) if quality else None

    @property
    def slope(self) -> Float[Tensor, ""]:
        """The common slope w."""
        return self._slope

    @property
    def intercepts(self) -> Float[Tensor, " K"] | Float[Tensor, "2 K"]:
        """b_k; with `separate_answer` row 0 is for thinking and row 1 for the answer."""
        return self._intercepts.view(2, -1) if self.separate_answer else self._intercepts

    def predict(
        self, features: Float[Tensor, "B K"], thinking: Bool[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B K"]:
        """Probability that each draft is accepted, given that those before it were.

        Args:
            features: f of every draft.
            thinking: Requests that are in their thinking; needed with `separate_answer`, and only then.
        """
        offsets = self._intercepts.view(-1, self.num_positions)
        rows = offsets[0] if not self.separate_answer else offsets[self._region(features, thinking)]
        return torch.sigmoid(self._slope * features + rows)

    def observe(
        self,
        features: Float[Tensor, "B K"],
        num_accepted: Int[Tensor, " B"],
        num_drafted: Int[Tensor, " B"],
        mask: Bool[Tensor, "B K"] | None = None,
        thinking: Bool[Tensor, " B"] | None = None,
    ) -> None:
        """Learns from a verify step: accepted drafts are positive labels, the first rejected one is a negative.

        Args:
            features: f of every draft.
            num_accepted: Accepted drafts of each request.
            num_drafted: Drafts of each request that were verified.
            mask: Drafts that may serve as labels. Rows that were forced (an exit, a budget, a contract) and requests
                whose target alone is transformed (penalties, allowed tokens) must not: the target did not judge there.
            thinking: As in `predict`.
        """
        step = torch.arange(self.num_positions, device=self.device)
        observed = (step <= num_accepted[:, None]) & (step < num_drafted[:, None])
        if mask is not None:
            observed = observed & mask
        predicted = self.predict(features, thinking)
        label = (step < num_accepted[:, None]).float()
        if self.quality is not None:
            self.quality.add(predicted, label, observed)
        self._sums = self._accumulate(features, predicted, label, observed, thinking)
        self._since_refit += 1
        if self._since_refit >= self.refit_interval:
            self.refit()

    def _region(self, features: Float[Tensor, "B K"], thinking: Bool[Tensor, " B"] | None) -> Int[Tensor, " B"]:
        """Row of the intercepts that each request reads."""
        if thinking is None:
            raise ValueError("an estimator with separate_answer must be told which requests are thinking")
        return (~thinking).long()

    def _accumulate(
        self,
        features: Float[Tensor, "B K"],
        predicted: Float[Tensor, "B K"],
        label: Float[Tensor, "B K"],
        observed: Bool[Tensor, "B K"],
        thinking: Bool[Tensor, " B"] | None,
    ) -> _Sums:
        features = torch.where(observed, features, 0.0)  # what stands behind a request's drafts means nothing
        weight = torch.where(observed, predicted * (1.0 - predicted), 0.0)
        residual = torch.where(observed, label - predicted, 0.0)
        old = self._sums
        return _Sums(
            old.hessian_slope + (weight * features * features).sum(),
            old.hessian_cross + self._by_group(weight * features, thinking),
            old.hessian_intercepts + self._by_group(weight, thinking),
            old.gradient_slope + (residual * features).sum(),
            old.gradient_intercepts + self._by_group(residual, thinking),
            old.counts + self._by_group(observed.float(), thinking),
        )

    def _by_group(self, values: Float[Tensor, "B K"], thinking: Bool[Tensor, " B"] | None) -> Float[Tensor, " G"]:
        """Sums over the requests that share an intercept."""
        if not self.separate_answer:
            return values.sum(0)
        zero = torch.zeros(2, self.num_positions, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self._region(values, thinking), values).flatten()

    def refit(self) -> None:
        """One Newton step from the round's sums, each parameter damped by how often it was seen."""
        s = self._sums
        a, c = s.hessian_slope + L2, s.hessian_intercepts + L2
        step = (s.gradient_slope - (s.hessian_cross * s.gradient_intercepts / c).sum()) / (
            a - (s.hessian_cross * s.hessian_cross / c).sum()
        )
        total = s.counts.sum()
        step = step * (total / (total + DAMPING_OBSERVATIONS))
        instead = -0.5 * self._slope if self.halve_slope else torch.zeros_like(step)
        step = torch.where(self._slope + step < 0.0, instead, torch.where(step.isnan(), 0.0, step))
        moves = (s.gradient_intercepts - s.hessian_cross * step) / c * (s.counts / (s.counts + DAMPING_OBSERVATIONS))
        moves = torch.where(moves.isnan(), 0.0, moves)
        self._slope = self._slope + step
        self._intercepts = self._intercepts + moves
        self._sums = self._carry(s, step, moves)
        self._since_refit = 0

    def _carry(self, s: _Sums, step: Float[Tensor, ""], moves: Float[Tensor, " G"]) -> _Sums:
        """What the next round starts with: the kept sums, their gradient taken to the new coefficients."""
        moved = s._replace(
            gradient_slope=s.gradient_slope - s.hessian_slope * step - (s.hessian_cross * moves).sum(),
            gradient_intercepts=s.gradient_intercepts - s.hessian_cross * step - s.hessian_intercepts * moves,
        )
        return _Sums(*(self.forgetting * value for value in moved))

    def save(self, path: Path) -> None:
        """Writes coefficients and the round's sums to a safetensors file, atomically."""
        tensors = {"slope": self._slope, "intercepts": self._intercepts, **self._sums._asdict()}
        settings = {
            "num_positions": self.num_positions,
            "refit_interval": self.refit_interval,
            "forgetting": self.forgetting,
            "separate_answer": self.separate_answer,
            "halve_slope": self.halve_slope,
            "since_refit": self._since_refit,
        }
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        write_bytes(path, save(copies, metadata={"acceptance_estimator": json.dumps(settings)}))

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device | str = "cpu", quality: bool = False
    ) -> OnlineAcceptanceEstimator:
        """Reads what `save` wrote.

        Raises:
            ValueError: The file holds no estimator, or one that makes no sense.
            OSError: It cannot be read.
        """
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get("acceptance_estimator")
            if written is None:
                raise ValueError(f"{path} holds no acceptance estimator; save one with OnlineAcceptanceEstimator.save")
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        fields = JsonFields.of(json.loads(written), where=str(path))
        estimator = cls(
            fields.integer("num_positions"),
            refit_interval=fields.integer("refit_interval"),
            forgetting=fields.number("forgetting"),
            separate_answer=fields.boolean("separate_answer"),
            halve_slope=fields.boolean("halve_slope"),
            device=device,
            quality=quality,
        )
        expected = {"slope": estimator._slope, "intercepts": estimator._intercepts, **estimator._sums._asdict()}
        for name, like in expected.items():
            found = tensors.get(name)
            if found is None or found.shape != like.shape or not math.isfinite(float(found.double().sum())):
                raise ValueError(f"{path}: the tensor {name!r} is missing, misshapen or not finite; save it anew")
        estimator._slope, estimator._intercepts = tensors["slope"], tensors["intercepts"]
        estimator._sums = _Sums(*(tensors[name] for name in _Sums._fields))
        estimator._since_refit = fields.integer("since_refit")
        return estimator

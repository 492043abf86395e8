"""Cactus acceptance inside Model Runner V2: the rejection sampler is fed with h in place of the target q.

Private names of vLLM that are touched here, on the instance: `GPUModelRunner.sample` with its `InputBatch`,
`sampler.apply_sampling_params`, `sampling_states.temperature`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.rows_v2 import first_row
from ace_learn.engines.vllm.settings import Acceptance
from ace_learn.speculation.rules import cactus_target, kl_divergence

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

Mask = Callable[[int, int], Bool[Tensor, " rows"] | None]
"""A mask over the rows [first, first + count) of the step; None: no row."""


def drafted_tokens(
    input_ids: Int[Tensor, " R"], slots: Int[Tensor, " R"], local: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """The drafted token that each row verifies: its successor's input. -1 in bonus rows and before placeholders.

    Args:
        input_ids: Input token of each row; -1 for a placeholder.
        slots: The request of each row.
        local: Which of its request's rows it is.
    """
    follows = (slots[1:] == slots[:-1]) & (local[1:] == local[:-1] + 1)
    return torch.cat((torch.where(follows, input_ids[1:].long(), -1), input_ids.new_full((1,), -1).long()))


def cactus_logits(
    logits: Float[Tensor, "R V"], drafted: Int[Tensor, " R"], active: Bool[Tensor, " R"], acceptance: Acceptance
) -> tuple[Float[Tensor, "R V"], Float[Tensor, " R"]]:
    """Replaces the logits of active rows by log h, and says what that costs.

    Args:
        logits: After temperature and truncation.
        drafted: The token that each row verifies; only read where `active`.
        active: Rows to which the rule applies.
        acceptance: Rule and budget.

    Returns:
        Float32 logits, and KL(h||q) of each row in nats, 0 where the rule does not apply.
    """
    q = logits.float().softmax(-1)
    h = cactus_target(q, drafted.clamp_min(0), acceptance.delta, acceptance.rule == "cactus_exact")
    divergence = torch.where(active, kl_divergence(h, q), 0.0)
    return torch.where(active[:, None], h.log(), logits.float()), divergence.float()


class CactusSampling:
    """Applies Cactus to the steps of a runner, and keeps the exact divergence of every row."""

    def __init__(self, acceptance: Acceptance, runner: GPUModelRunner, *, thinking: Mask, forced: Mask) -> None:
        """Wraps the sampling of a runner that has loaded its model.

        Args:
            acceptance: Rule and budget.
            runner: The runner.
            thinking: Rows whose next token is thought.
            forced: Rows whose next token is forced; no rule applies to them.
        """
        self.acceptance, self.thinking, self.forced = acceptance, thinking, forced
        self._temperature: Tensor = runner.sampler.sampling_states.temperature.gpu
        self._divergences: list[Float[Tensor, " rows"]] = []
        self._batch: InputBatch | None = None
        runner.sample = self._following(runner.sample)
        runner.sampler.apply_sampling_params = self._wrapped(runner.sampler.apply_sampling_params)

    def _following(self, sample: Callable[..., object]) -> Callable[..., object]:
        def sample_(hidden_states: Tensor, input_batch: InputBatch, grammar_output: object) -> object:
            self._batch, self._divergences = input_batch, []
            return sample(hidden_states, input_batch, grammar_output)

        return sample_

    def _wrapped(self, apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def apply_sampling_params(
            logits: Tensor,
            expanded_idx_mapping: Tensor,
            idx_mapping: Tensor,
            idx_mapping_np: np.ndarray,
            pos: Tensor,
            input_ids: Tensor,
            expanded_local_pos: Tensor,
            seq_lens_upper_bound_np: np.ndarray,
            skip_top_k_top_p: bool = False,
        ) -> Tensor:
            logits = apply(
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                input_ids,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                skip_top_k_top_p,
            )
            if skip_top_k_top_p or self._batch is None:  # no drafts are verified
                return logits
            return self._raised(logits, input_ids, expanded_idx_mapping, expanded_local_pos)

        return apply_sampling_params

    def _raised(self, logits: Tensor, input_ids: Tensor, slots: Tensor, local: Tensor) -> Tensor:
        assert self._batch is not None
        first = first_row(slots, self._batch)
        drafted = drafted_tokens(input_ids, slots, local)
        active = (drafted >= 0) & (self._temperature[slots.long()] > 0)
        forced = self.forced(first, len(logits))
        if forced is not None:
            active = active & ~forced
        if self.acceptance.only_in_think:
            thinking = self.thinking(first, len(logits))
            active = torch.zeros_like(active) if thinking is None else active & thinking
        logits, divergence = cactus_logits(logits, drafted, active, self.acceptance)
        # Copied now, so that the copy is done when vLLM's own copies of the step are.
        self._divergences.append(divergence.to("cpu", non_blocking=True))
        return logits

    def done(self) -> Callable[[list[list[int]]], dict[str, float]] | None:
        """Ends a step. What it spent: once its output has arrived, maps the sampled tokens to nats per request."""
        if self._batch is None or not self._divergences:
            self._batch = None
            return None
        ids, bounds = list(self._batch.req_ids), np.asarray(self._batch.cu_num_logits_np).copy()
        rows, self._batch = self._divergences, None
        return lambda sampled: spent(ids, bounds, torch.cat(rows).numpy(), sampled)


def spent(
    request_ids: list[str],
    bounds: Int[np.ndarray, " ends"],
    divergence: Float[np.ndarray, " R"],
    sampled: list[list[int]],
) -> dict[str, float]:
    """Nats that each request of a step has spent: the sum over the rows that were reached.

    Args:
        request_ids: B requests.
        bounds: First row of each, and R.
        divergence: Of each row.
        sampled: Tokens that the step gave to each request; row r was reached where it gave more than r.
    """
    return {
        request_id: float(divergence[first : first + len(tokens)].sum())
        for request_id, first, tokens in zip(request_ids, bounds, sampled, strict=False)
    }

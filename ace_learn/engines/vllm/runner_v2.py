"""Exits on Model Runner V2 of vLLM.

Tokens are forced by `AceLogitsProcessor`, on vLLM's documented interface. What that interface lacks is taken from the
instance. Private names of vLLM that are touched here: `GPUModelRunner.sample` with its `InputBatch`,
`model.compute_logits`, `execute_model_state.aux_hidden_states`, `req_states.prefill_len`, `sampler.logits_processors`,
`sampler.thinking_budget_state`, `adaptive_verification`, `num_speculative_steps`. Where a head reads the drafter's
states, `_prefill`, `_run_model`, `propose`, `hidden_states` and `last_token_indices` of the speculator as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.drafted import DraftedRows
from ace_learn.engines.vllm.labels import first_forced_rows, grading
from ace_learn.engines.vllm.logits import allowed_ends
from ace_learn.engines.vllm.processor import AceLogitsProcessor
from ace_learn.engines.vllm.rows import StepRows
from ace_learn.engines.vllm.rows_v2 import first_row
from ace_learn.engines.vllm.runner import RunnerExits
from ace_learn.engines.vllm.slots import to_device

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState


class V2Exits(RunnerExits):
    """Exits on a V2 runner: rows are read where the target computes its logits, before any grammar."""

    runner: GPUModelRunner

    def attach(self, runner: GPUModelRunner) -> None:
        """Wraps the sampling of a runner that has loaded its model, and finds our processor in its sampler.

        Raises:
            ValueError: The drafter's states are read, and it does not show them.
        """
        self.runner = runner
        self._batch: InputBatch | None = None
        self._unread = False
        self._grammar: GrammarOutput | None = None
        self._tapped: list[Tensor] | None = None
        self._budgeted: Bool[Tensor, " R"] | None = None
        self._processor(runner).exits = self
        runner.sample = self._wrapped_sample(runner.sample)
        runner.model.compute_logits = self._wrapped_logits(runner.model.compute_logits)
        if self.hook.drafted is not None:
            self._watch_drafter(runner)
        estimator = getattr(runner.speculator, "acceptance_estimator", None)
        if estimator is not None:
            estimator.step = grading(estimator.step, self.first_forced)
            budget = runner.sampler.thinking_budget_state
            if budget.enabled:
                budget.apply = self._wrapped_budget(budget)

    @staticmethod
    def _processor(runner: GPUModelRunner) -> AceLogitsProcessor:
        ours = [p for p in runner.sampler.logits_processors if isinstance(p, AceLogitsProcessor)]
        assert len(ours) == 1, f"the sampler has {len(ours)} of our logits processors"
        return ours[0]

    def before_sampling(self, grammar: GrammarOutput | None) -> None:
        """Keeps the tapped layers, which the runner lets go of before it samples."""
        state = self.runner.execute_model_state
        self._tapped = None if state is None else state.aux_hidden_states

    def done(self) -> bool:
        """Ends a step; whether it has a report."""
        self._batch = self._tapped = None
        return super().done()

    def _wrapped_sample(self, sample: Callable[..., object]) -> Callable[..., object]:
        def sample_(hidden_states: Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None) -> object:
            self._batch, self._grammar, self._budgeted = input_batch, grammar_output, None
            self._unread = self.follows(input_batch.req_ids)
            return sample(hidden_states, input_batch, grammar_output)

        return sample_

    def _wrapped_logits(self, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def compute_logits(hidden_states: Tensor) -> Tensor:
            logits = compute(hidden_states)
            batch = self._batch
            if self._unread and batch is not None:
                self._unread = False  # prompt log-probabilities call this too, later in the step
                self.observe(batch.req_ids, lambda: self._rows(batch, logits))
            return logits

        return compute_logits

    def _wrapped_budget(self, budget: ThinkingBudgetState) -> Callable[[Tensor, LogitsContext], None]:
        """Notes the rows whose next token vLLM's own thinking budget forces: it raises a logit of the think end."""
        stock, end = budget.apply, budget.reasoning_end_token_ids.long()

        def apply(logits: Float[Tensor, "rows V"], context: LogitsContext) -> None:
            batch = self._batch
            if batch is None or not budget.use_thinking_budget[context.idx_mapping_np].any():
                stock(logits, context)
                return
            before = logits[:, end]
            stock(logits, context)
            if self._budgeted is None:
                self._budgeted = torch.zeros_like(batch.expanded_local_pos, dtype=torch.bool)
            first = first_row(context.expanded_idx_mapping, batch)
            self._budgeted[first : first + len(logits)] = (logits[:, end] != before).any(-1)

        return apply

    def _watch_drafter(self, runner: GPUModelRunner) -> None:
        """Copies what the drafter's model says in the first pass of a proposal, which runs the tokens of the step.

        The copy is a part of that pass, and so of the CUDA graphs that are made of it.
        """
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        speculator = runner.speculator
        if not isinstance(speculator, TargetDependentARSpeculator):
            raise ValueError(
                f"the head reads the drafter's hidden states (draft), which {type(speculator).__name__} does not show; "
                "draft with EAGLE-3 or one MTP layer, or train a head on other sources"
            )
        kept, inside = torch.zeros_like(speculator.hidden_states), False
        prefill, run_model, propose = speculator._prefill, speculator._run_model, speculator.propose

        def first_pass(*args: object, **given: object) -> None:
            nonlocal inside
            inside = True
            try:
                prefill(*args, **given)
            finally:
                inside = False

        def run(*args: object, **given: object) -> tuple[Tensor, Tensor]:
            read, fed_back = run_model(*args, **given)
            if inside:
                kept[: len(read)].copy_(read)
            return read, fed_back

        def propose_(input_batch: InputBatch, *args: object, **given: object) -> Tensor:
            drafts: Tensor = propose(input_batch, *args, **given)
            batch = self._batch  # None in a dummy run
            if batch is not None and self.follows(batch.req_ids):
                size = batch.num_reqs
                rows = DraftedRows(
                    hidden=kept,
                    positions=batch.positions.long(),
                    first=batch.query_start_loc[:size].long(),
                    last=speculator.last_token_indices[:size],
                    longest=int(batch.num_scheduled_tokens.max()),
                )
                self.hook.keep_drafted(batch.req_ids, lambda: rows)
            return drafts

        speculator._prefill, speculator._run_model, speculator.propose = first_pass, run, propose_

    def _rows(self, batch: InputBatch, logits: Float[Tensor, "R V"]) -> StepRows:
        indices = batch.logits_indices
        tokens, positions = batch.input_ids[indices].long(), batch.positions[indices].long()
        local, slots = batch.expanded_local_pos.long(), batch.expanded_idx_mapping.long()
        # Before its prompt is computed a request has no drafts: such rows are padding.
        placeholder = (local > 0) & (positions - local < self.runner.req_states.prefill_len.gpu[slots])
        trimmed = self.runner.adaptive_verification is not None
        counts = self._counts(batch, len(tokens), trimmed=trimmed)
        assert self.layer.hidden is not None
        return StepRows(
            request_ids=batch.req_ids,
            counts=counts,
            tokens=torch.where(placeholder, -1, tokens),
            positions=positions,
            hidden=self.layer.hidden,
            logits=logits,
            aux=self.aux_rows(self._tapped, indices),
            allowed=self._allowed(batch, local),
            starts=batch.cu_num_logits.long() if trimmed else None,
        )

    def _counts(self, batch: InputBatch, rows: int, *, trimmed: bool) -> Int[np.ndarray, " B"]:
        """Rows of each request; where only the device knows them, any counts with the right sum and maximum."""
        longest: int = self.runner.num_speculative_steps + 1
        counts: np.ndarray = np.diff(batch.cu_num_logits_np)
        if trimmed:
            counts = np.clip(rows - longest * np.arange(len(counts)), 0, longest)
        return counts

    def _allowed(self, batch: InputBatch, local: Int[Tensor, " R"]) -> Tensor | None:
        drafts = batch.num_draft_tokens_per_req
        scheduled = np.diff(batch.cu_num_logits_np) if drafts is None else drafts + 1
        allowed = allowed_ends(self._grammar, batch.req_ids, scheduled, self.served.head.identity.markers.end)
        if allowed is None:
            return None
        rows = torch.arange(len(local), device=local.device)
        request = torch.searchsorted(batch.cu_num_logits[1:].long(), rows, right=True)
        return to_device(torch.from_numpy(allowed), local.device)[request, local]

    def first_forced(self, requests: Int[Tensor, " B"]) -> Int[Tensor, " B"] | None:
        """The first row of each request that an exit or the thinking budget forces in this step; None: none can be."""
        if self._batch is None or (self.forced is None and self._budgeted is None):
            return None
        local = self._batch.expanded_local_pos
        forced = torch.full_like(local, -1) if self.forced is None else self.forced
        if self._budgeted is not None:
            forced = torch.where(self._budgeted, 0, forced)
        return first_forced_rows(forced, local, len(requests))

    def thinking_rows(self, first: int, count: int) -> Bool[Tensor, " rows"] | None:
        """Of `count` rows of the step, those whose next token is thought; None where no request is followed."""
        return None if self.hook.thinking is None else self.hook.thinking[first : first + count]

    def forced_rows(self, first: int, count: int) -> Bool[Tensor, " rows"] | None:
        """Of `count` rows of the step, those whose next token is forced; None where none can be."""
        return None if self.forced is None else self.forced[first : first + count] >= 0

    def apply(self, logits: Float[Tensor, "rows V"], context: LogitsContext) -> Float[Tensor, "rows V"]:
        """Forces the rows of one call of our processor: the whole step, or some of its requests."""
        if self._batch is None or (self.forced is None and self.open is None):
            return logits
        slots = context.expanded_idx_mapping
        first = first_row(slots, self._batch)
        temperature = self.runner.sampler.sampling_states.temperature.gpu[slots.long()]
        return self.shape(logits, slice(first, first + len(logits)), temperature)

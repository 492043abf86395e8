"""Exits on vLLM's first model runner (CPU, and the fallback on GPUs).

Private names of vLLM that are touched here, all on the instance: `execute_model_state` with `logits` and
`spec_decode_metadata`, `input_batch.req_ids`, `input_ids`, `positions`, `query_start_loc`, `max_num_reqs`, `sampler`
and `rejection_sampler` with their `apply_logits_processors`. Where a head reads the drafter's states,
`drafter.propose` and `drafter.model`, `discard_request_mask`, `optimistic_seq_lens_cpu` and `requests` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ace_learn.engines.vllm.drafted import DraftedRows
from ace_learn.engines.vllm.logits import allowed_ends
from ace_learn.engines.vllm.rows import StepRows
from ace_learn.engines.vllm.runner import RunnerExits
from ace_learn.engines.vllm.slots import to_device

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner


class V1Exits(RunnerExits):
    """Exits on a V1 runner: tokens are forced at the end of the sampler's own processor step."""

    runner: GPUModelRunner

    def attach(self, runner: GPUModelRunner) -> None:
        """Wraps the samplers of a runner that has loaded its model, and the drafter whose states are read.

        Raises:
            ValueError: The drafter's states are read, and it does not show them.
        """
        self.runner = runner
        if self.hook.drafted is not None:
            self._watch_drafter(runner)
        self._bonus_rows: Int[Tensor, " B"] | None = None
        self._one = np.ones(runner.max_num_reqs, dtype=np.int64)
        runner.sampler.apply_logits_processors = self._wrapped(runner.sampler.apply_logits_processors)
        if getattr(runner, "rejection_sampler", None) is not None:
            sampler = runner.rejection_sampler
            sampler.apply_logits_processors = self._wrapped_targets(sampler.apply_logits_processors)

    def before_sampling(self, grammar: GrammarOutput | None) -> None:
        """Reads the rows of the step whose logits stand in `execute_model_state`."""
        state = self.runner.execute_model_state
        if state is None or state.logits is None or not self.follows(self.runner.input_batch.req_ids):
            return
        metadata = state.spec_decode_metadata
        self._bonus_rows = None if metadata is None else metadata.bonus_logits_indices.long()
        self.observe(self.runner.input_batch.req_ids, lambda: self._rows(state, grammar))

    def _rows(self, state: ExecuteModelState, grammar: GrammarOutput | None) -> StepRows:
        runner, metadata = self.runner, state.spec_decode_metadata
        request_ids = runner.input_batch.req_ids
        size, scheduled = len(request_ids), state.scheduler_output
        which: Int[Tensor, " R"] | slice = slice(size)
        counts = self._one[which]
        if metadata is not None:
            counts = np.asarray(metadata.num_draft_tokens, dtype=np.int64) + 1
            which = metadata.logits_indices.long()
        elif scheduled.total_num_scheduled_tokens > size:
            which = runner.query_start_loc.gpu[1 : size + 1] - 1
        allowed = None
        if grammar is not None:
            end, drafts = self.served.head.identity.markers.end, scheduled.scheduled_spec_decode_tokens
            allowed = allowed_ends(grammar, request_ids, counts, end, drafts=drafts)
        assert self.layer.hidden is not None
        return StepRows(
            request_ids=request_ids,
            counts=counts,
            tokens=runner.input_ids.gpu[which],
            positions=runner.positions[which],
            hidden=self.layer.hidden,
            logits=state.logits,
            aux=self.aux_rows(state.aux_hidden_states, which),
            allowed=None if allowed is None else to_device(_flat(allowed, counts), runner.device),
        )

    def _watch_drafter(self, runner: GPUModelRunner) -> None:
        """Keeps what the drafter's model says in the first pass of a proposal, which runs the tokens of the step."""
        model = runner.drafter.model
        hooked = isinstance(model, nn.Module) and type(model).__call__ is nn.Module.__call__
        if not hooked or runner.drafter.uses_mrope:
            raise ValueError(
                f"the head reads the drafter's hidden states (draft), which {type(model).__name__} does not show; "
                "leave breakable CUDA graphs and multimodal targets out, or train a head on other sources"
            )
        self._proposing: Callable[[Tensor], DraftedRows] | None = None
        runner.drafter.propose = self._wrapped_propose(runner.drafter.propose)
        model.register_forward_hook(self._keep_drafted)

    def _wrapped_propose(self, propose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def propose_(
            *,
            target_positions: Int[Tensor, " T"],
            next_token_ids: Int[Tensor, " B"],
            token_indices_to_sample: Int[Tensor, " B"] | None,
            common_attn_metadata: CommonAttentionMetadata,
            **given: object,
        ) -> Tensor:
            starts, longest = common_attn_metadata.query_start_loc.long(), common_attn_metadata.max_query_len
            last = starts[1:] - 1 if token_indices_to_sample is None else token_indices_to_sample.long()
            self._proposing = lambda hidden: DraftedRows(hidden, target_positions, starts[:-1], last, longest)
            return propose(
                target_positions=target_positions,
                next_token_ids=self._behind_chunks(next_token_ids),
                token_indices_to_sample=token_indices_to_sample,
                common_attn_metadata=common_attn_metadata,
                **given,
            )

        return propose_

    def _behind_chunks(self, next_tokens: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """The token behind each request's rows; in the middle of a prompt vLLM gives the prompt's last one instead."""
        runner, size = self.runner, len(next_tokens)
        partial = np.flatnonzero(runner.discard_request_mask.np[:size])
        if not len(partial):
            return next_tokens
        tokens = torch.full((size,), -1, dtype=next_tokens.dtype)
        for b in partial:
            request = runner.requests[runner.input_batch.req_ids[b]]
            tokens[b] = request.get_token_id(int(runner.optimistic_seq_lens_cpu[b]))
        given = to_device(tokens, next_tokens.device)
        return torch.where(given >= 0, given, next_tokens)

    def _keep_drafted(self, module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        rows_of, self._proposing = self._proposing, None
        if rows_of is not None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.hook.keep_drafted(self.runner.input_batch.req_ids, lambda: rows_of(hidden))

    def _wrapped(
        self, apply: Callable[[Tensor, SamplingMetadata, bool], Tensor]
    ) -> Callable[[Tensor, SamplingMetadata, bool], Tensor]:
        def apply_logits_processors(
            logits: Float[Tensor, "rows V"], sampling_metadata: SamplingMetadata, predict_bonus_token: bool
        ) -> Float[Tensor, "rows V"]:
            logits = apply(logits, sampling_metadata, predict_bonus_token)
            which = slice(None) if self._bonus_rows is None else self._bonus_rows
            return self.shape(logits, which, _temperatures(logits, sampling_metadata))

        return apply_logits_processors

    def _wrapped_targets(
        self, apply: Callable[[Tensor, SamplingMetadata, SpecDecodeMetadata], Tensor]
    ) -> Callable[[Tensor, SamplingMetadata, SpecDecodeMetadata], Tensor]:
        def apply_logits_processors(
            logits: Float[Tensor, "rows V"], sampling_metadata: SamplingMetadata, metadata: SpecDecodeMetadata
        ) -> Float[Tensor, "rows V"]:
            logits = apply(logits, sampling_metadata, metadata)
            temperature = _temperatures(logits, sampling_metadata, metadata)
            return self.shape(logits, metadata.target_logits_indices.long(), temperature)

        return apply_logits_processors


def _temperatures(
    logits: Float[Tensor, "rows V"], sampling: SamplingMetadata, metadata: SpecDecodeMetadata | None = None
) -> Float[Tensor, " rows"]:
    """The temperature of each row: of each request, or, with `metadata`, of each drafted token."""
    if sampling.temperature is None:  # all are greedy
        return logits.new_zeros(len(logits))
    temperature: Tensor = sampling.temperature
    if metadata is None:
        return temperature
    ends = metadata.cu_num_draft_tokens.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.repeat_interleave(temperature, counts, output_size=len(logits))


def _flat(allowed: Bool[np.ndarray, "B Q E"], counts: Int[np.ndarray, " B"]) -> Bool[Tensor, "R E"]:
    return torch.from_numpy(allowed[np.arange(allowed.shape[1]) < counts[:, None]])

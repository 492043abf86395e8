"""Our schedulers without a model: the steps' tokens are written down, and the outputs read as an API process does."""

from collections import defaultdict
from typing import NamedTuple

import torch

from ace_learn.engines.vllm.settings import Settings
from ace_learn.reasoner import weights_path


class Delivered(NamedTuple):
    """All that left the scheduler for one request."""

    tokens: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    record: dict | None
    logprobs: list[float]
    chunks: list[int]
    """Tokens of each output."""


class Script:
    """A scheduler, and what a runner says of each step."""

    def __init__(self, *, settings=None, asynchronous=False, num_draft_tokens=4, blocks=4000, ours=True, max_seqs=64):
        from vllm.config import SpeculativeConfig  # noqa: F401 (config modules register themselves)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from ace_learn.engines.vllm.scheduler import AceAsyncScheduler, AceScheduler

        classes = (AceScheduler, AceAsyncScheduler) if ours else (Scheduler, AsyncScheduler)
        speculation = {"method": "ngram", "num_speculative_tokens": num_draft_tokens, "prompt_lookup_max": 3}
        config = EngineArgs(
            model=str(weights_path()),
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            async_scheduling=False,
            speculative_config=speculation if num_draft_tokens else None,
        ).create_engine_config()
        config.additional_config = {"ace_learn": (settings or Settings()).to_json()}
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = classes[asynchronous](
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
            log_stats=False,
        )
        self.config, self.asynchronous, self.num_draft_tokens = config, asynchronous, num_draft_tokens
        self.scripts: dict[str, list[int]] = {}
        self.given: dict[str, int] = defaultdict(int)
        self.outputs: dict[str, list] = defaultdict(list)
        self.events = {}
        """Request -> function of (output tokens before the step, tokens of the step) to the events of its rows."""

    def add(self, request_id, script, params, *, prompt=(5, 6, 7)):
        from vllm.v1.request import Request

        self.scripts[request_id] = list(script)
        self.scheduler.add_request(
            Request(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, pooling_params=None)
        )

    def step(self, window=5):
        """One step in which each request gets up to `window` tokens of its script, as far as drafts were scheduled."""
        from vllm.v1.outputs import DraftTokenIds

        output = self.scheduler.schedule()
        sampled = [self._sample(key, output, window) for key in output.num_scheduled_tokens]
        result = self._result(output, sampled)
        for of_client in self.scheduler.update_from_output(output, result).values():
            for item in of_client.outputs:
                self.outputs[item.request_id].append(item)
        if self.num_draft_tokens and not self.asynchronous:
            keys = [key for key in output.num_scheduled_tokens if key in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(keys, [[1] * self.num_draft_tokens for _ in keys]))
        return output

    def _sample(self, key, output, window):
        request = self.scheduler.requests[key]
        if request.is_prefill_chunk:
            return []
        most = 1 + len(output.scheduled_spec_decode_tokens.get(key, ()))
        at = self.given[key]
        tokens = self.scripts[key][at : at + min(window, most)]
        assert tokens, f"the script of {key} is over and it goes on"
        self.given[key] += len(tokens)
        return tokens

    def _result(self, output, sampled):
        import numpy as np
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        from ace_learn.engines.vllm.events import StepReport

        keys = list(output.num_scheduled_tokens)
        starts = np.cumsum([0, *map(len, sampled)]).tolist()
        flat = np.array([token for tokens in sampled for token in tokens])
        exits = [
            event
            for key, tokens in zip(keys, sampled, strict=True)
            if key in self.events
            for event in self.events[key](self.given[key] - len(tokens), tokens)
        ]
        result = ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: i for i, key in enumerate(keys)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(flat[:, None], -flat[:, None].astype(np.float32), flat * 0, starts),
        )
        result.ace_learn = StepReport(exits, [], [], off=False)
        return result

    def run(self, window=5, limit=400):
        """Steps until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step(window)
        assert not self.scheduler.has_unfinished_requests()

    def delivered(self, request_id):
        """All that left for a request."""
        items = self.outputs[request_id]
        last = items[-1]
        reason = None if last.finish_reason is None else str(last.finish_reason)
        return Delivered(
            tokens=[token for item in items for token in item.new_token_ids],
            finish_reason=reason,
            stop_reason=last.stop_reason,
            record=(last.kv_transfer_params or {}).get("ace_learn"),
            logprobs=[
                float(x) for item in items if item.new_logprobs is not None for x in item.new_logprobs.logprobs[:, 0]
            ],
            chunks=[len(item.new_token_ids) for item in items],
        )

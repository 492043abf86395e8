"""The contract commit inside vLLM's engine core, and the audit record of each request.

`AceScheduler` and `AceAsyncScheduler` are vLLM's own schedulers; for a request with a contract or exits they read the
accepted tokens of each step, end the request at the token that completes its answer, and hold back tokens that may only
serve to decide. Other requests cost one look into a dictionary per step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from ace_learn.artifacts import read_fields
from ace_learn.engines.follower import FollowRules
from ace_learn.engines.vllm.answer import RequestFollower, TokenEffects
from ace_learn.engines.vllm.audit import KEY, Audit
from ace_learn.engines.vllm.events import ExitEvent, StepReport
from ace_learn.engines.vllm.options import RequestOptions, read_options, sampling_of
from ace_learn.engines.vllm.settings import settings_of
from ace_learn.heads.export import CONFIG_NAME, HeadCard
from ace_learn.speculation.window import Finish, FinishLimits
from ace_learn.thinking import ThinkMarkers

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

STOP_REASON = "ace_contract"
"""`stop_reason` of a request that ended at its contract's commit."""

_logger = logging.getLogger(__name__)


class _Texts:
    """What token ids spell, by the tokenizer of the engine core."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self.effects = TokenEffects(self.decode)
        self._markers: dict[tuple[str, str], ThinkMarkers] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Text of tokens as clients see it by default, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def markers(self, start: str, end: str) -> ThinkMarkers:
        """Token ids of think markers."""
        found = self._markers.get((start, end))
        if found is None:
            found = ThinkMarkers.from_tokenizer(self._tokenizer, start=start, end=end, multi_token=True)
            self._markers[start, end] = found
        return found


@dataclass
class _Live:
    """A request that is followed."""

    follower: RequestFollower
    audit: Audit
    held_tokens: list[int] = field(default_factory=list)
    """Tokens that have not left yet."""
    held_logprobs: LogprobsLists | None = None
    """Their log-probabilities, where the request asks for any."""


class AceScheduler(Scheduler):
    """vLLM's scheduler, with contract commits and audit records."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what vLLM gives its scheduler.

        Raises:
            ValueError: vLLM runs without a tokenizer.
        """
        super().__init__(*args, **kwargs)
        settings = settings_of(self.vllm_config.additional_config)
        assert settings is not None, "this scheduler is for servers that are configured for ace_learn"
        tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        if tokenizer is None:
            raise ValueError("contracts and audits read text: leave out --skip-tokenizer-init")
        self._ace_settings, self._ace_policy = settings, settings.policy()
        self._ace_markers = None if settings.head is None else _markers_of(Path(settings.head))
        self._ace_texts = _Texts(tokenizer)
        self._ace_live: dict[str, _Live] = {}
        self._ace_events: dict[str, list[ExitEvent]] = {}
        self._ace_blocked: dict[str, list[int]] = {}
        self._ace_off = False
        self._ace_drafted: Mapping[str, Sequence[int]] = {}

    def add_request(self, request: Request) -> None:
        """Starts to follow a request that asks for a contract or exits; streaming-input sessions stay vLLM's own."""
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.resumable or request.sampling_params is None or request.prompt_token_ids is None:
            return
        try:
            live = self._ace_follow(request)
        except ValueError as error:  # the API process refuses these; an exception here would end the engine
            _logger.error("request %s is served without exits and contract: %s", request.request_id, error)
            return
        if live is not None:
            self._ace_live[request.request_id] = live

    def _ace_follow(self, request: Request) -> _Live | None:
        params = request.sampling_params
        options = read_options(
            params.extra_args,
            self._ace_settings,
            self._ace_policy,
            request_id=request.request_id,
            sampling=sampling_of(params),
        )
        if not options.exits and options.contract is None:
            return None
        rules = self._ace_rules(params, options, request)
        budget = params.thinking_token_budget
        return _Live(
            RequestFollower(request.prompt_token_ids, rules, self._ace_texts.effects), Audit(options, budget=budget)
        )

    def _ace_rules(self, params: SamplingParams, options: RequestOptions, request: Request) -> FollowRules:
        texts, contract = self._ace_texts, options.contract
        markers = self._ace_markers
        if markers is None:
            assert contract is not None, "exits need a head, and a head names its markers"
            markers = texts.markers(contract.think_start, contract.think_end)
        ends = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        limits = FinishLimits(
            stop_ids=frozenset(ends),
            max_new_tokens=request.max_tokens,
            context_room=max(1, self.max_model_len - request.num_prompt_tokens),
            min_tokens=params.min_tokens,
        )
        return FollowRules(
            markers=markers,
            decode=texts.decode,
            limits=limits,
            contract=contract,
            stop=tuple(stop),
            decode_stop=texts.decode_plain if params.skip_special_tokens else texts.decode,
        )

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Forgets requests that are ended from outside, in the middle of thinking as well."""
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._ace_live.pop(request.request_id, None)
        return ended

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Reads a step's tokens; what it gives holds the tokens that may leave, and the records of ended requests."""
        self._ace_note(getattr(model_runner_output, "ace_learn", None))
        for request_id, nats in getattr(model_runner_output, "ace_learn_spent", {}).items():
            if request_id in self._ace_live:
                self._ace_live[request_id].audit.spend(nats)
        self._ace_drafted = scheduler_output.scheduled_spec_decode_tokens
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self._ace_live:
            for of_client in outputs.values():
                of_client.outputs = [output for output in of_client.outputs if self._ace_release(output)]
        return outputs

    def _ace_note(self, report: StepReport | None) -> None:
        """Sorts what the hook says of a step by request."""
        self._ace_events, self._ace_blocked = {}, {}
        if report is None:
            return
        self._ace_off = report.off
        for event in report.exits:
            self._ace_events.setdefault(event.request_id, []).append(event)
        for request_id, row in report.blocked:
            self._ace_blocked.setdefault(request_id, []).append(row)
        for request_id, message in report.failures:
            live = self._ace_live.get(request_id)
            if live is not None:
                live.audit.fail(message)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Ends a request at the token where its answer is complete, and drops what stands behind it."""
        live = self._ace_live.get(request.request_id)
        if live is None:
            plain: tuple[list[int], bool] = super()._update_request_with_output(
                request, new_token_ids, is_stale=is_stale
            )
            return plain
        follower = live.follower
        before, sampled = follower.length, len(new_token_ids)
        finish = follower.push(new_token_ids, num_drafted=len(self._ace_drafted.get(request.request_id, ())))
        key = request.request_id
        live.audit.see(
            self._ace_events.get(key, ()), before=before, sampled=sampled, blocked=self._ace_blocked.get(key, ())
        )
        if finish is not None:
            del new_token_ids[max(0, finish.length - before) :]
        kept, stopped = super()._update_request_with_output(request, new_token_ids, is_stale=is_stale)
        if finish is None:
            if stopped:  # by a rule of vLLM's own, such as repetition detection
                by_itself = request.status == RequestStatus.FINISHED_STOPPED
                follower.settle(Finish(before + len(kept), "stop" if by_itself else "length"))
        elif finish.reason == "contract":
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, STOP_REASON
        elif not stopped:
            assert follower.stop is not None, f"{request.request_id} ends as {finish}, and vLLM goes on"
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, follower.stop.commit.answer
        return kept, stopped or finish is not None

    def _ace_release(self, output: EngineCoreOutput) -> bool:
        """Takes out of a step's output what may only serve to decide; returns whether anything is left in it."""
        live = self._ace_live.get(output.request_id)
        if live is None:
            return True
        if output.finished:
            del self._ace_live[output.request_id]
        tokens = live.held_tokens + output.new_token_ids
        logprobs = _joined(live.held_logprobs, output.new_logprobs)
        aligned = output.new_sampling_mask is not None or output.routed_experts is not None  # these cannot be held back
        count = live.follower.take(everything=aligned)
        output.new_token_ids, live.held_tokens = tokens[:count], tokens[count:]
        if logprobs is not None:
            output.new_logprobs, live.held_logprobs = _rows(logprobs, slice(count)), _rows(logprobs, slice(count, None))
        if output.finished:
            reason = _reason(output, live.follower)
            record = live.audit.record(live.follower, finish_reason=reason, hook_off=self._ace_off)
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: record}
        return bool(
            output.finished
            or count
            or output.events
            or output.prefill_stats is not None
            or output.new_prompt_logprobs_tensors is not None
            or output.prompt_token_id_logprobs is not None
        )


class AceAsyncScheduler(AceScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def _markers_of(head: Path) -> ThinkMarkers:
    return HeadCard.from_json(read_fields(head / CONFIG_NAME)).identity.markers


def _reason(output: EngineCoreOutput, follower: RequestFollower) -> str:
    """Why a request ended: what the follower knows, where vLLM has no reason of its own."""
    given = str(output.finish_reason)
    return follower.finish.reason if given in ("stop", "length") and follower.finish is not None else given


def _joined(first: LogprobsLists | None, second: LogprobsLists | None) -> LogprobsLists | None:
    """The rows of two lists, one after the other."""
    if first is None or second is None:
        return first or second
    return LogprobsLists(*(np.concatenate(pair) for pair in zip(first[:3], second[:3], strict=True)), None)


def _rows(logprobs: LogprobsLists, rows: slice) -> LogprobsLists:
    return LogprobsLists(*(column[rows] for column in logprobs[:3]), None)

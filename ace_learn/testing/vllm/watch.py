"""What happens inside an in-process engine while it runs: accepted windows, exits within them, preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


@dataclass(kw_only=True)
class Watched:
    """Counts of a run."""

    steps: int = 0
    verify_steps: int = 0
    """Steps of single requests that had drafts."""
    verified_tokens: int = 0
    """Tokens that those gave, accepted drafts and the one behind them."""
    exits: int = 0
    """Forced think ends that were kept."""
    inside: int = 0
    """Of those, the ones behind an accepted draft and before a further one."""
    discarded: int = 0
    """Rows that fired behind a rejected draft, and left no trace."""
    preemptions: int = 0
    failures: int = 0
    """Requests that the hook gave up."""

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a verify step; 1 where no draft is ever accepted, nan without drafts."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else float("nan")

    def see(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Counts one step."""
        self.steps += 1
        sampled = dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=False))
        drafted = {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()}
        for name in drafted:
            if sampled.get(name):
                self.verify_steps += 1
                self.verified_tokens += sampled[name]
        report = getattr(output, "ace_learn", None)
        if report is None:
            return
        self.failures += len(report.failures)
        for event in report.exits:
            if not event.forced:
                continue
            kept = event.row < sampled.get(event.request_id, 0)
            self.exits += kept
            self.discarded += not kept
            self.inside += kept and 0 < event.row < drafted.get(event.request_id, 0)


@contextmanager
def watching(llm: LLM) -> Iterator[Watched]:
    """Counts what an in-process engine does within the block."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    watched = Watched()
    update, preempt = scheduler.update_from_output, scheduler._preempt_request

    def update_from_output(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        watched.see(scheduled, output)
        outputs: dict[int, EngineCoreOutputs] = update(scheduled, output)
        return outputs

    def preempt_request(request: Request, *args: object, **kwargs: object) -> None:
        watched.preemptions += 1
        preempt(request, *args, **kwargs)

    scheduler.update_from_output, scheduler._preempt_request = update_from_output, preempt_request
    try:
        yield watched
    finally:
        del scheduler.update_from_output, scheduler._preempt_request

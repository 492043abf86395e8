"""What our workers add to vLLM's: exits on the runner that they have loaded, and a call that describes them.

Documented names of vLLM: `WorkerBase.load_model`, `compile_or_warm_up_model`, `execute_model`, `sample_tokens`,
`collective_rpc`. Private ones: `model_runner`, `use_v2_model_runner`, attributes set on `ModelRunnerOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from ace_learn.engines.signaller import HeadSignaller
from ace_learn.engines.vllm.cactus import CactusSampling
from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.output_layer import OutputLayer
from ace_learn.engines.vllm.runner import RunnerExits
from ace_learn.engines.vllm.served import check_drafter, load_served_head
from ace_learn.engines.vllm.settings import settings_of
from ace_learn.json_type import JSON

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase
else:
    WorkerBase = object

REPORT = "ace_learn"
"""Attribute of a `ModelRunnerOutput` that holds the step's `StepReport`."""
SPENT = "ace_learn_spent"
"""Attribute of a `ModelRunnerOutput` that holds the nats that Cactus has spent on each request in the step."""

Attach = Callable[[ModelRunnerOutput], None]
"""Puts something of ours on an output whose copies have arrived."""


class ReportedOutput(AsyncModelRunnerOutput):
    """An output on which something is put when its copies have arrived."""

    def __init__(self, output: AsyncModelRunnerOutput, attach: Sequence[Attach]) -> None:
        """Wraps vLLM's output."""
        self.output, self.attach = output, attach

    def get_output(self) -> ModelRunnerOutput:
        """The output of vLLM, with ours on it."""
        output = self.output.get_output()
        for attach in self.attach:
            attach(output)
        return output


class AceWorker(WorkerBase):
    """Comes before a worker class of vLLM; without a head it changes nothing."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner
    use_v2_model_runner: bool
    exits: RunnerExits | None = None
    cactus: CactusSampling | None = None

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Loads the model, then attaches exits to it."""
        super().load_model(*args, **kwargs)
        self.exits = attach_exits(self.vllm_config, self.model_runner, v2=self.use_v2_model_runner)
        self.cactus = attach_cactus(self.vllm_config, self.model_runner, self.exits)

    def compile_or_warm_up_model(self) -> object:
        """Warms up the model, then the exit rule."""
        times = super().compile_or_warm_up_model()
        if self.exits is not None:
            dtype = self.vllm_config.model_config.dtype
            self.exits.warm_up(self.model_runner.get_model().compute_logits, dtype)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> object:
        """Follows the requests of the step, then runs it."""
        if self.exits is not None:
            self.exits.admit(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object:
        """Samples the step, with tokens forced where the exit rule fires, and puts its report on the output."""
        if self.exits is not None:
            self.exits.before_sampling(grammar_output)
        output = super().sample_tokens(grammar_output)
        attach = self._attachments()
        if attach and isinstance(output, AsyncModelRunnerOutput):
            return ReportedOutput(output, attach)
        for put in attach:
            put(output)
        return output

    def _attachments(self) -> list[Attach]:
        """Ends the step on our side; what is to be put on its output."""
        attach: list[Attach] = []
        if self.exits is not None and self.exits.done():
            report = self.exits.hook.report
            attach.append(lambda output: setattr(output, REPORT, report()))
        spent = None if self.cactus is None else self.cactus.done()
        if spent is not None:
            attach.append(lambda output: setattr(output, SPENT, spent(output.sampled_token_ids)))
        return attach

    def ace_status(self) -> dict[str, JSON]:
        """Whether exits run here, whether failures have switched them off, and for how many requests at present."""
        idle: dict[str, JSON] = {"exits": False, "off": False, "followed": 0, "slots": 0}
        return idle if self.exits is None else self.exits.status()


def attach_exits(config: VllmConfig, runner: GPUModelRunner, *, v2: bool) -> RunnerExits | None:
    """Puts exits onto a runner that has loaded its model; None where the server has no head.

    Raises:
        ValueError: The loaded model is not what the head was trained for, or cannot give what it reads.
    """
    from ace_learn.engines.vllm.runner_v1 import V1Exits
    from ace_learn.engines.vllm.runner_v2 import V2Exits

    settings = settings_of(config.additional_config)
    if settings is None or settings.head is None:
        return None
    served = load_served_head(settings, config.model_config)
    layer = OutputLayer(runner.get_model())
    speculation = config.speculative_config
    check_drafter(served.head, speculation)
    ranks = get_tensor_model_parallel_world_size()
    alone = config.parallel_config.distributed_executor_backend == "external_launcher"
    reports = alone or get_tensor_model_parallel_rank() == 0
    hook = ExitHook(
        markers=served.head.identity.markers,
        tables=served.tables,
        policy=served.policy,
        signaller=HeadSignaller(served.head.head, served.head.spec, runner.device),
        spec=served.head.spec,
        token_logits=layer.token_logits,
        device=runner.device,
        num_draft_tokens=0 if speculation is None else speculation.num_speculative_tokens,
        steps_in_flight=2 if config.scheduler_config.async_scheduling else 1,
        max_failures=settings.max_failures,
        compiled=settings.compile,
        num_requests=2 * config.scheduler_config.max_num_seqs,  # those that run and those that were preempted
        ranks=ranks,
        reports=reports,
    )
    kind = V2Exits if v2 else V1Exits
    exits = kind(hook, served, settings, layer, reports=reports)
    exits.find_taps(runner.get_model())
    exits.attach(runner)
    return exits


def attach_cactus(config: VllmConfig, runner: GPUModelRunner, exits: RunnerExits | None) -> CactusSampling | None:
    """Puts Cactus acceptance onto a runner; None where the server keeps vLLM's own rule."""
    from ace_learn.engines.vllm.runner_v2 import V2Exits

    settings = settings_of(config.additional_config)
    if settings is None or settings.acceptance.rule == "standard":
        return None
    if isinstance(exits, V2Exits):
        return CactusSampling(settings.acceptance, runner, thinking=exits.thinking_rows, forced=exits.forced_rows)
    return CactusSampling(settings.acceptance, runner, thinking=_no_rows, forced=_no_rows)


def _no_rows(first: int, count: int) -> None:
    return None

"""What both model runners of vLLM share: which requests are followed, what is forced, and how reports travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.logits import force_tokens, stops_to_end
from ace_learn.engines.vllm.options import RequestOptions, read_options
from ace_learn.engines.vllm.output_layer import OutputLayer
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.engines.vllm.served import ServedHead
from ace_learn.engines.vllm.settings import Settings
from ace_learn.engines.vllm.slots import to_device
from ace_learn.exit.policy import ExitPolicy
from ace_learn.json_type import JSON

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RunnerExits(ABC):
    """Exits on one loaded runner: follows its requests, and forces tokens where the hook says so."""

    def __init__(
        self, hook: ExitHook, served: ServedHead, settings: Settings, layer: OutputLayer, *, reports: bool
    ) -> None:
        """Takes the parts.

        Args:
            hook: The exit rule.
            served: Head and policy.
            settings: Of the server.
            layer: The target's output layer.
            reports: Whether anybody reads this rank's outputs.
        """
        self.hook, self.served, self.settings, self.layer = hook, served, settings, layer
        self.reports = reports
        self.inert = RequestOptions(
            exits=False, shadow=False, policy=ExitPolicy.never(), certified=False, contract=None
        )
        self.followed: set[str] = set()
        self.forced: Int[Tensor, " R"] | None = None
        """Of the step that is being sampled; -1: free."""
        self.open: Bool[Tensor, " R"] | None = None
        """Rows of that step at which a stop token would end the thinking; None: nowhere."""
        self.endless: set[str] = set()
        """Followed requests that stop tokens do not end."""
        end = served.head.identity.markers.end
        # Behind a stop token a longer think end would have to be forced from its second token on, which no state knows.
        stops = len(end) == 1 and bool(served.stop_ids)
        self._ends = torch.tensor([*end, *served.stop_ids], device=layer.weight.device) if stops else None
        self.taps: tuple[int, ...] = ()
        self._observed = False

    def warm_up(self, compute_logits: Callable[[Tensor], Tensor], kind: torch.dtype) -> None:
        """Compiles the exit rule, if it is to be compiled, for rows as the target gives them.

        Args:
            compute_logits: The target's output layer.
            kind: The type of its hidden states.
        """
        if not self.settings.compile:
            return
        device = self.layer.weight.device
        logits = compute_logits(torch.zeros(2, self.layer.weight.shape[1], dtype=kind, device=device))
        assert self.layer.hidden is not None
        zero = torch.zeros(2, dtype=torch.long, device=device)
        aux = torch.zeros(2, self.served.head.spec.width("target_aux"), dtype=kind, device=device)
        self.hook.warm_up(RowTensors(zero, zero.clone(), self.layer.hidden, logits, aux, allowed=None))

    def admit(self, step: SchedulerOutput) -> None:
        """Follows the requests that enter with a step, and forgets those that have finished before it."""
        self.hook.finish(step.finished_req_ids)
        self.followed -= step.finished_req_ids
        self.endless -= step.finished_req_ids
        for request in step.scheduled_new_reqs:
            self._admit(request)

    def _admit(self, request: NewRequestData) -> None:
        options = self._options(request)
        self.hook.admit(request.req_id, request.prompt_token_ids or (), options)
        if options.exits:
            self.followed.add(request.req_id)
            if request.sampling_params is not None and request.sampling_params.ignore_eos:
                self.endless.add(request.req_id)

    def _options(self, request: NewRequestData) -> RequestOptions:
        """What a request asks for; one without token ids (prompt embeddings) or sampling has no exits."""
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None:
            return self.inert
        try:
            return read_options(params.extra_args, self.settings, self.served.policy, request_id=request.req_id)
        except ValueError:  # the API process refuses these, and the scheduler has logged it
            return self.inert

    def observe(self, request_ids: Sequence[str], read: Callable[[], StepRows]) -> None:
        """Shows the hook the rows of a step; what it says is forced until `done`. Never raises.

        Args:
            request_ids: Of the step.
            read: Reads the rows out of the runner.
        """
        self._observed = True
        try:
            rows = read()
        except Exception as error:  # noqa: BLE001  # the engine must outlive a runner that is not as we know it
            self.hook.abandon(request_ids, error)
            return
        self.forced = self.hook.observe(rows)
        if self._ends is not None:
            self.open = self._ending(rows)

    def _ending(self, rows: StepRows) -> Bool[Tensor, " R"] | None:
        """Rows of the step at which a stop token would end the thinking."""
        ends = self.hook.open
        if ends is None or self.endless.isdisjoint(rows.request_ids):
            return ends
        device = ends.device
        ended = torch.tensor([request_id not in self.endless for request_id in rows.request_ids])
        counts = to_device(torch.from_numpy(rows.counts), device) if rows.starts is None else rows.starts.diff()
        own = torch.repeat_interleave(to_device(ended, device), counts, output_size=len(ends))
        return ends & own

    def shape(
        self, logits: Float[Tensor, "rows V"], which: Int[Tensor, " rows"] | slice, temperature: Float[Tensor, " rows"]
    ) -> Float[Tensor, "rows V"]:
        """Applies what the rule says to the logits of some rows of the step, in place.

        Args:
            logits: Float32, after every other processor, before temperature and truncation.
            which: Which rows.
            temperature: Of each row; 0 is greedy.
        """
        if self.open is not None and self._ends is not None:
            stops_to_end(logits, self.open[which], temperature, self._ends)
        return logits if self.forced is None else force_tokens(logits, self.forced[which])

    def follows(self, request_ids: Sequence[str]) -> bool:
        """Whether any request of a batch has exits; where none has, a step costs nothing."""
        return not self.followed.isdisjoint(request_ids)

    def find_taps(self, model: nn.Module) -> None:
        """Where the layers that the head reads stand among those that the drafter taps.

        Raises:
            ValueError: The drafter taps other layers.
        """
        if not self.hook.reads_aux:
            return
        found = [getattr(module, "aux_hidden_state_layers", ()) for module in model.modules()]
        tapped: tuple[int, ...] = next((layers for layers in found if layers), ())
        wanted = self.served.head.spec.aux_layers
        if not set(wanted) <= set(tapped):
            raise ValueError(
                f"the head reads the hidden states of layers {list(wanted)}, and the drafter taps {list(tapped)}; name "
                "an EAGLE-3 drafter that taps the same layers, or train a head without target_aux"
            )
        self.taps = tuple(tapped.index(layer) for layer in wanted)

    def aux_rows(
        self, tapped: Sequence[Float[Tensor, "T H"]] | None, which: Int[Tensor, " R"] | slice
    ) -> Float[Tensor, "R A"] | None:
        """The tapped layers of the logits rows, concatenated as the head was trained on them."""
        if not self.hook.reads_aux:
            return None
        assert tapped is not None, "the configuration was checked for a drafter that taps layers"
        return torch.cat([tapped[i][which] for i in self.taps], dim=-1)

    @abstractmethod
    def attach(self, runner: GPUModelRunner) -> None:
        """Wraps what a runner that has loaded its model calls when it samples."""

    @abstractmethod
    def before_sampling(self, grammar: GrammarOutput | None) -> None:
        """Prepares the step that the runner is about to sample."""

    def status(self) -> dict[str, JSON]:
        """What runs here."""
        return {
            "exits": True,
            "off": self.hook.off,
            "followed": len(self.followed),
            "slots": self.hook.num_followed,
        }

    def done(self) -> bool:
        """Ends a step; whether it has a report."""
        self.forced = self.open = None
        observed, self._observed = self._observed, False
        return observed and self.reports

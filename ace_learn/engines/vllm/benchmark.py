"""What the exit hook costs per step, beside a decode step of a small model on the same machine, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ace_learn.artifacts import ProvenanceRecorder, atomic_folder, dump_config, write_json, write_text
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features.spec import FeatureSpec
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.json_type import JSON
from ace_learn.models.attention import GROUPED_ATTENTION
from ace_learn.models.cache import SlotCache
from ace_learn.thinking import BoundaryTables, ThinkMarkers

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

_START, _END, _BREAK, _TEXT = 0, 1, 2, 3


_POLICY = ExitPolicy(
    predicate="all", thresholds={"confidence": 0.8, "progress": 0.3, "remaining": 200.0}, ewma=0.1, smooth_over="tokens"
)


@dataclass(frozen=True, kw_only=True)
class HookBenchmark:
    """Sizes of the measurement."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where both run. On `cpu`, times are processor time, and the hook's includes reading its report; on `cuda`, they
    are those between two events on the device, waiting for launches included: neither is captured in a graph."""
    batch_sizes: tuple[int, ...] = (1, 16, 64, 256)
    """Requests per step, B."""
    draft_tokens: tuple[int, ...] = (0, 4, 8)
    """Drafted tokens per request and step, K."""
    context: int = 64
    """Tokens of each request before the step; the model's step reads their keys and values."""
    steps: int = 30
    """Steps of the hook per measurement; the fastest counts."""
    model_steps: int = 3
    """Steps of the model per measurement; the fastest counts."""
    compiled: bool = False
    """Compile the hook, as the server's setting `compile` does."""
    output: Path | None = None
    """Folder to write the figures to; it must not exist."""

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: A size is out of range, or there is no such device.
        """
        sizes = (*self.batch_sizes, self.context, self.steps, self.model_steps)
        if not self.batch_sizes or not self.draft_tokens or min(sizes) < 1 or min(self.draft_tokens) < 0:
            raise ValueError(
                "need at least one of batch_sizes and of draft_tokens, sizes >= 1 and draft_tokens >= 0, not "
                f"{self.batch_sizes}, {self.draft_tokens} and context {self.context}, steps {self.steps}, "
                f"model_steps {self.model_steps}"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; choose --device cpu")


class HookCost(NamedTuple):
    """The cost at one size of a step."""

    requests: int
    draft_tokens: int
    hook_us: float
    """Microseconds per step of the hook."""
    model_us: float
    """Microseconds of the model's step, output layer included."""

    @property
    def share(self) -> float:
        """The hook's cost as a fraction of the model's."""
        return self.hook_us / self.model_us


@torch.inference_mode()
def benchmark_hook(config: HookBenchmark) -> list[HookCost]:
    """Measures every size, hook and model in turn, and prints a line for each.

    Raises:
        ValueError: The output exists.
    """
    target = nullcontext() if config.output is None else atomic_folder(config.output)
    with ProvenanceRecorder() as recorder, target as folder:
        model = _model(torch.device(config.device))
        print(f"{'B':>4}{'K':>4}{'hook us':>12}{'model us':>12}{'share':>9}")
        costs = []
        for requests, draft_tokens in product(config.batch_sizes, config.draft_tokens):
            cost = _measure(config, model, requests, draft_tokens)
            costs.append(cost)
            print(
                f"{requests:>4}{draft_tokens:>4}{cost.hook_us:>12.0f}{cost.model_us:>12.0f}{cost.share:>9.2%}",
                flush=True,
            )
        if folder is not None:
            write_json(folder / "costs.json", _figures(config, model, costs))
            write_text(folder / "config.yaml", dump_config(config))
            recorder.write(folder)
    return costs


def _figures(config: HookBenchmark, model: LlamaForCausalLM, costs: list[HookCost]) -> dict[str, JSON]:
    device = torch.cuda.get_device_name() if config.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "model_parameters": model.num_parameters(),
        "costs": [{**cost._asdict(), "share": cost.share} for cost in costs],
    }


def _small_llama() -> LlamaConfig:
    """135 million parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )


def _model(device: torch.device) -> LlamaForCausalLM:
    """With random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(_small_llama())
    nn.Module.to(model, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    model.set_attn_implementation(GROUPED_ATTENTION)
    model.eval()
    return model


class _Step:
    """One decode step of B requests with K drafted tokens each, for the model and for the hook."""

    def __init__(self, config: HookBenchmark, model: LlamaForCausalLM, requests: int, draft_tokens: int) -> None:
        self.model = model
        shape = (requests, draft_tokens + 1)
        self.tokens = torch.full(shape, _TEXT, device=model.device)
        self.positions = config.context + torch.arange(shape[1], device=model.device).expand(shape)
        self.cache = SlotCache(model.config.num_hidden_layers, requests, config.context + shape[1])
        self.hook = _hook(model, draft_tokens, compiled=config.compiled)
        ids = [str(i) for i in range(requests)]
        prompt = [_TEXT] * (config.context - 1) + [_START]
        for request_id in ids:
            self.hook.admit(request_id, prompt, _Options())
        hidden, logits = self.forward()
        one = np.ones(requests, dtype=np.int64)
        rows = StepRows(ids, one, self.tokens[:, 0], self.positions[:, 0] - 1, hidden[:: shape[1]], logits[:: shape[1]])
        self.hook.observe(rows)  # the prompt's last token
        self.hook.report()
        self.rows = StepRows(ids, one * shape[1], self.tokens.flatten(), self.positions.flatten(), hidden, logits)

    def forward(self) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R V"]]:
        """The model's step; its keys and values are written over those of the step before."""
        mask = self.cache.begin(self.positions, self.cache.capacity)
        output = self.model.model(
            input_ids=self.tokens,
            position_ids=self.positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden = output.last_hidden_state.flatten(0, 1)
        return hidden, self.model.lm_head(hidden)

    def observe(self) -> None:
        """The hook's step."""
        self.hook.observe(self.rows)

    def observe_and_report(self) -> None:
        """The hook's step, and its report."""
        self.hook.observe(self.rows)
        self.hook.report()


@dataclass(frozen=True)
class _Options:
    exits: bool = True
    shadow: bool = False
    policy: ExitPolicy = _POLICY


def _hook(model: LlamaForCausalLM, draft_tokens: int, *, compiled: bool) -> ExitHook:
    spec = FeatureSpec(sources=("target_last", "scalars"), hidden_size=model.config.hidden_size, aux_layers=())
    texts = ["<think>", "</think>", "\n\n", *["a"] * (model.config.vocab_size - 3)]

    def token_logits(tokens: Int[Tensor, " R"], hidden: Float[Tensor, "R H"]) -> Float[Tensor, " R"]:
        weight: Tensor = model.lm_head.weight
        logits: Tensor = torch.linalg.vecdot(weight[tokens], hidden)
        return logits

    hook = ExitHook(
        markers=ThinkMarkers((_START,), (_END,)),
        tables=BoundaryTables.from_texts(texts),
        policy=_POLICY,
        signaller=HeadSignaller(SignalHead(HeadConfig(), spec.size), spec, model.device),
        spec=spec,
        token_logits=token_logits,
        device=model.device,
        num_draft_tokens=draft_tokens,
        compiled=compiled,
        num_requests=256,
    )
    zero = torch.zeros(2, dtype=torch.long, device=model.device)
    hidden: Tensor = torch.zeros(2, model.config.hidden_size, device=model.device, dtype=model.dtype)
    hook.warm_up(RowTensors(zero, zero.clone(), hidden, model.lm_head(hidden), aux=None, allowed=None))
    return hook


def _measure(config: HookBenchmark, model: LlamaForCausalLM, requests: int, draft_tokens: int) -> HookCost:
    step = _Step(config, model, requests, draft_tokens)
    on_cpu = config.device == "cpu"
    timed = _seconds_on_cpu if on_cpu else _seconds_on_cuda
    observe = step.observe_and_report if on_cpu else step.observe
    observe()
    hook: list[float] = []
    forward: list[float] = []
    for part in range(config.model_steps):  # in turn, so that whatever else the machine does hits both
        forward.append(timed(step.forward))
        hook += [timed(observe) for _ in range(part, config.steps, config.model_steps)]
    return HookCost(requests, draft_tokens, 1e6 * min(hook), 1e6 * min(forward))


def _seconds_on_cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _seconds_on_cuda(work: Callable[[], object]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1e3

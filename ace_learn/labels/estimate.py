"""What a build recipe will need on a GPU, from the model's config.json alone: a formula, not a measurement.

Memory is counted from what the reference engine allocates. A phase (prefill, decoding, probes, answers without
thinking) takes max(FLOPs / (peak * mfu), bytes / (bandwidth * efficiency)) + steps * overhead seconds, with

    FLOPs per token = 2 * weights of its linear layers + 4 * layers * query width * context
    bytes per step  = weights + keys and values of the rows that run

The longest trace of a batch (`longest_trace`) sets its steps; its rows retire as they end, so that the token count
goes by the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ace_learn.features import INDEX_COLUMNS, FeatureSpec
from ace_learn.labels.build import BuildConfig
from ace_learn.models.cache import grown_capacity
from ace_learn.models.target import DTYPES, EMBEDDED
from ace_learn.reasoner import weights_path
from ace_learn.signals import COLUMNS, LEARNED
from ace_learn.speculation.drafters import DraftStates

GB = 1e9
_LOGIT_BYTES = 80
"""Bytes per logit alive at once when a step samples: logits, log-probabilities and distribution in float32, the sorted
nucleus with its indices, and the noise in 64 bits."""


class Hardware(NamedTuple):
    """One accelerator, by its data sheet (dense bfloat16)."""

    memory_gb: float
    peak_tflops: float
    bandwidth_tb_s: float


HARDWARE = {
    "a100-80g": Hardware(80, 312, 2.04),
    "h100": Hardware(80, 989, 3.35),
    "h200": Hardware(141, 989, 4.8),
}


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(BuildConfig):
    """A recipe of `python -m ace_learn.build`, and what to assume of the model and the machine."""

    hardware: Literal["a100-80g", "h100", "h200"] = "a100-80g"
    """Accelerator whose data sheet is taken."""
    memory_gb: float | None = None
    """Its memory, where another than the data sheet's."""
    peak_tflops: float | None = None
    """Its peak in TFLOP/s, where another."""
    bandwidth_tb_s: float | None = None
    """Its memory bandwidth in TB/s, where another."""
    mfu: float = 0.4
    """Share of the peak that large matrix products reach."""
    efficiency: float = 0.6
    """Share of the bandwidth that is reached."""
    step_overhead_ms: float = 30.0
    """What an eager step costs besides: kernel launches and the engine's own Python."""
    prompt_tokens: int = 200
    """Mean length of a prompt."""
    trace_tokens: int = 2000
    """Mean length of a trace's thinking."""
    longest_trace: float = 3.0
    """Longest trace of a batch, as a multiple of the mean; `max_new_tokens` caps it."""
    boundaries: int = 50
    """Mean number of paragraph ends of a trace."""
    answer_tokens: int = 150
    """Mean length of an answer; `max_answer_tokens` caps it, and is what the longest of a batch takes."""

    def __post_init__(self) -> None:
        """Checks the assumptions."""
        super().__post_init__()
        for name in ("prompt_tokens", "trace_tokens", "longest_trace", "answer_tokens", "mfu", "efficiency"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.boundaries < 0 or self.step_overhead_ms < 0 or self.longest_trace < 1:
            raise ValueError("boundaries and step_overhead_ms must be >= 0, and longest_trace >= 1")
        for name in Hardware._fields:
            given = getattr(self, name)
            if given is not None and given <= 0:
                raise ValueError(f"{name} must be positive, not {given}; leave it out for the data sheet's")
        if self.target.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.target.dtype!r}; known: {', '.join(DTYPES)}")
        if self.mfu > 1 or self.efficiency > 1:
            raise ValueError("mfu and efficiency are shares; they must be <= 1")

    @property
    def machine(self) -> Hardware:
        """The accelerator with what the flags replace."""
        sheet = HARDWARE[self.hardware]
        return Hardware(
            self.memory_gb or sheet.memory_gb,
            self.peak_tflops or sheet.peak_tflops,
            self.bandwidth_tb_s or sheet.bandwidth_tb_s,
        )

    @property
    def longest(self) -> int:
        """Output tokens of the longest trace of a batch."""
        return math.ceil(min(self.max_new_tokens, self.longest_trace * self.trace_tokens + self.max_answer_tokens))


class ModelSize(NamedTuple):
    """What counts of a model's architecture."""

    parameters: int
    body: int
    """Weights of the linear layers before the output layer."""
    head: int
    """Weights of the output layer; of the embedding as well, where the two are tied."""
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    query_width: int
    """Query heads times head size."""
    kv_width: int
    """Key-value heads times head size."""
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.parameters * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_width * self.dtype.itemsize

    def flops(self, tokens: float, *, context: float, logits: float | None = None) -> float:
        """FLOPs of running tokens that each attend to `context` positions; `logits` of them have logits (None: all)."""
        attention = 4 * self.layers * self.query_width * context
        return tokens * (2 * self.body + attention) + 2 * self.head * (tokens if logits is None else logits)


def model_size(config: PretrainedConfig, dtype: str = "auto") -> ModelSize:
    """Reads the sizes off the architecture, built without memory for its weights.

    Args:
        config: The model's config.
        dtype: As `target.dtype`; `auto` is what the config says.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = model.get_output_embeddings().weight
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not head)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    saved = getattr(config, "dtype", None) or torch.float32
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        body=linear,
        head=head.numel(),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        vocab=text.vocab_size,
        query_width=text.num_attention_heads * head_dim,
        kv_width=text.num_key_value_heads * head_dim,
        dtype=saved if dtype == "auto" else getattr(torch, dtype),
    )


def feature_bytes(spec: FeatureSpec, rows: float, dtype: torch.dtype) -> float:
    """Data bytes of a features file of so many rows (its header is a few hundred bytes more)."""
    floats = sum(spec.width(source) * (4 if source in COLUMNS else dtype.itemsize) for source in spec.sources)
    return rows * (floats + 4 * len(LEARNED) + 8 * len(INDEX_COLUMNS))


class Memory(NamedTuple):
    """Bytes."""

    weights: float
    cache: float
    """Keys and values of a batch of traces, with the room that the cache grows by."""
    fork: float
    """The copy that a batch of probes branches off."""
    step: float
    """Logits and noise of a step, or the prefill's activations, whichever is larger."""
    batch_rows: float
    """Feature rows of a batch, in the host's memory: as captured, and as written."""
    shard_rows: float
    """Feature rows of a shard, on the disk."""
    dataset_rows: float
    """Feature rows of the data set, on the disk."""

    @property
    def device(self) -> float:
        """What must fit on the accelerator."""
        return self.weights + self.cache + self.fork + self.step


def memory_of(config: EstimateConfig, size: ModelSize) -> Memory:
    """Peak memory of a build."""
    batch, prompt, longest = config.batch_size, config.prompt_tokens, config.max_new_tokens  # some trace is cut there
    capacity = grown_capacity(2 * prompt, prompt + longest)  # a ragged prefill is padded to twice the prompt
    fork = prompt + longest + 1 + config.max_answer_tokens
    groups = size.query_width // size.kv_width
    activations = batch * prompt * (8 * size.hidden + 3 * size.intermediate) * size.dtype.itemsize
    mask = batch * groups * prompt * 2 * prompt * (1 + size.dtype.itemsize)
    layer_copy = batch * capacity * size.kv_bytes / (2 * size.layers)  # one layer's keys, while they are moved
    rows = config.trace_tokens if config.features.rows == "all" else config.boundaries
    per_problem = feature_bytes(_spec(config, size), rows, size.dtype)
    return Memory(
        weights=size.weight_bytes,
        cache=batch * capacity * size.kv_bytes,
        fork=batch * fork * size.kv_bytes,
        step=max(batch * size.vocab * _LOGIT_BYTES, activations + mask) + layer_copy,
        batch_rows=2 * batch * per_problem,
        shard_rows=config.shard_size * per_problem,
        dataset_rows=sum(config.splits.values()) * per_problem,
    )


def _spec(config: EstimateConfig, size: ModelSize) -> FeatureSpec:
    chosen = config.features.aux_layers
    layers = tuple(range(min(3, size.layers))) if chosen is None else chosen
    drafter = config.features.drafter
    states = DraftStates(size=size.hidden, delay=drafter.draft_tokens + 1, drafter="")  # as wide as the target, mostly
    return FeatureSpec(
        sources=config.features.sources,
        hidden_size=size.hidden,
        aux_layers=layers if "target_aux" in config.features.sources else (),
        draft=None if drafter.kind == "none" else states,
    )


class Phase(NamedTuple):
    """One part of the work, over the whole data set."""

    name: str
    tokens: float
    """Tokens run through the model."""
    steps: float
    """Forward passes."""
    flops: float
    bytes: float
    """Read from the accelerator's memory."""
    seconds: float


def phases_of(config: EstimateConfig, size: ModelSize) -> list[Phase]:
    """Work and time of a build's phases."""
    problems = sum(config.splits.values())
    batches = sum(math.ceil(min(config.shard_size, problems - i) / config.batch_size) for i in _starts(config))
    prompt, longest = config.prompt_tokens, config.longest
    answer = min(config.answer_tokens, config.max_answer_tokens)
    thought = min(config.trace_tokens, longest)
    decoded = min(thought + answer, longest)
    probes, chunks = _probes(config, batches)
    prefill = problems * prompt
    kept = prompt + thought / 2  # of a mean probe
    shapes: Sequence[tuple[str, float, float, float, float, float]] = (
        # name, tokens, steps, context of a token, tokens with logits, bytes copied
        ("prefill", prefill, batches, prompt / 2, problems, 0),
        ("traces", problems * decoded, batches * longest, prompt + longest / 2, problems * decoded, 0),
        ("probes", probes * (answer + 1), chunks * (config.max_answer_tokens + 1), kept + answer / 2,
         probes * (answer + 1), 2 * probes * kept * size.kv_bytes),
        ("answers without thinking", prefill + problems * answer, batches * (1 + config.max_answer_tokens),
         prompt + answer / 2, problems * (1 + answer), 0),
    )  # fmt: skip
    phases = []
    for name, tokens, steps, context, logits, copied in shapes:
        rows_read = problems if name == "prefill" else tokens
        read = steps * size.weight_bytes + rows_read * context * size.kv_bytes + copied
        flops = size.flops(tokens, context=context, logits=logits)
        phases.append(Phase(name, tokens, steps, flops, read, _seconds(config, flops, read, steps)))
    return phases


def _seconds(config: EstimateConfig, flops: float, read: float, steps: float) -> float:
    machine = config.machine
    compute = flops / (machine.peak_tflops * 1e12 * config.mfu)
    memory = read / (machine.bandwidth_tb_s * 1e12 * config.efficiency)
    return max(compute, memory) + steps * config.step_overhead_ms / 1e3


def _starts(config: EstimateConfig) -> range:
    return range(0, sum(config.splits.values()), config.shard_size)


def _probes(config: EstimateConfig, batches: int) -> tuple[float, float]:
    """Probes of the data set, and the batches in which they run (a round of single questions is a batch)."""
    problems, train = sum(config.splits.values()), config.splits.get("train", 0)
    probing, count = config.probing, config.boundaries
    asked = {"all": count, "bisect": math.ceil(math.log2(count + 1)), "first": math.ceil(count / 2)}[probing.strategy]
    audited = probing.audit * train
    whole = (problems - train) * count + audited * count * probing.samples
    single = (train - audited) * asked * probing.samples
    if probing.strategy == "all":
        return whole + single, math.ceil((whole + single) / config.batch_size) + batches
    return whole + single, math.ceil(whole / config.batch_size) + batches * asked * probing.samples


def read_size(config: EstimateConfig) -> ModelSize:
    """The sizes of the model that a recipe names, from its config.json.

    Raises:
        ValueError: There is no such config, or no causal language model of its kind.
    """
    source = config.target.model
    if source == EMBEDDED:
        source = str(weights_path())
    try:
        found = AutoConfig.from_pretrained(source, revision=None if Path(source).exists() else config.target.revision)
        return model_size(found, config.target.dtype)
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"cannot read the config of {source!r}: {error}. Name with --model a folder that holds a config.json, or "
            "that file, of a causal language model"
        ) from error


def print_estimate(config: EstimateConfig) -> None:
    """Prints what a build will need.

    Raises:
        ValueError: The model's config cannot be read.
    """
    print("\n".join(estimate_lines(config, read_size(config))))


def estimate_lines(config: EstimateConfig, size: ModelSize) -> list[str]:
    """The tables as text."""
    machine, memory, phases = config.machine, memory_of(config, size), phases_of(config, size)
    problems, free = sum(config.splits.values()), machine.memory_gb * GB - memory.device
    verdict = f"fits, {free / GB:.1f} GB to spare" if free >= 0 else f"{-free / GB:.1f} GB too much: lower batch_size"
    total = Phase("together", *(sum(column) for column in zip(*(phase[1:] for phase in phases), strict=True)))
    return [
        f"{config.target.model}: {size.parameters / 1e9:.2f}e9 parameters in {str(size.dtype).removeprefix('torch.')}, "
        f"{size.kv_bytes:,} bytes of keys and values per token",
        f"Estimated, not measured, for {problems:,} problems in batches of {config.batch_size}. Assumed:",
        f"prompts of {config.prompt_tokens:,} tokens, thinking of {config.trace_tokens:,} ({config.longest:,} in the "
        f"longest of a batch), {config.boundaries} boundaries, answers of {config.answer_tokens:,}",
        "",
        f"memory of one {config.hardware} ({machine.memory_gb:g} GB)",
        *(_amount(name, value) for name, value in _memory_rows(memory)[:4]),
        f"{_amount('together', memory.device)}   {verdict}",
        "feature rows",
        *(_amount(name, value) for name, value in _memory_rows(memory)[4:]),
        "",
        f"{'time':<26}{'Mtokens':>10}{'steps':>10}{'PFLOP':>10}{'TB read':>10}{'hours':>10}",
        *map(_phase_row, [*phases, total]),
    ]


def _memory_rows(memory: Memory) -> list[tuple[str, float]]:
    return [
        ("weights", memory.weights),
        ("cache of the traces", memory.cache),
        ("its copy for the probes", memory.fork),
        ("a step", memory.step),
        ("of a batch, host memory", memory.batch_rows),
        ("of a shard, disk", memory.shard_rows),
        ("of the data set, disk", memory.dataset_rows),
    ]


def _amount(name: str, value: float) -> str:
    return f"  {name:<24}{value / GB:>10.2f} GB"


def _phase_row(phase: Phase) -> str:
    return (
        f"  {phase.name:<24}{phase.tokens / 1e6:>10.2f}{phase.steps:>10,.0f}{phase.flops / 1e15:>10.0f}"
        f"{phase.bytes / 1e12:>10.0f}{phase.seconds / 3600:>10.1f}"
    )

"""What each drafter gives: tokens per forward pass of the target, and time against no speculation, side by side."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from ace_learn.artifacts import JSON, ProvenanceRecorder, write_json, write_text
from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.requests import Output, Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.bootstrap import Bootstrap, percentile_interval
from ace_learn.models.draft_files import EMBEDDED_DRAFT
from ace_learn.models.target import EMBEDDED, Target, TargetConfig, load_target
from ace_learn.speculation.drafters import Drafter, DrafterConfig
from ace_learn.tasks import TaskConfig, build_task, render_prompt

_PLAIN = "none"
_NOISED = "noised copy"


def _drafters() -> dict[str, DrafterConfig]:
    return {
        "ngram": DrafterConfig(kind="ngram"),
        "eagle3": DrafterConfig(kind="eagle3", model=EMBEDDED_DRAFT),
    }


@dataclass(frozen=True, kw_only=True)
class SpeculationBenchmark:
    """A recipe of `python -m ace_learn.bench speculation`."""

    output: Path = Path("runs/speculation")
    """Folder for the table, the figures and their provenance."""
    target: TargetConfig = TargetConfig(model=EMBEDDED)
    """The model that verifies."""
    drafters: dict[str, DrafterConfig] = field(default_factory=_drafters)
    """What drafts, by name; `draft_tokens` is that of the sweep."""
    noised_copy: float = 0.1
    """Noise on the weights of a copy of the target that drafts as a draft model, in their standard deviations; 0: none
    is made. It accepts much and costs as much as the target, so it shows tokens per forward rather than time."""
    draft_tokens: tuple[int, ...] = (2, 4, 8)
    """Draft lengths, K."""
    task: TaskConfig = TaskConfig(name="reasoner")
    """Where the problems come from."""
    problems: int = 64
    """Problems that every drafter decodes."""
    batch_size: int = 8
    """Requests decoded together."""
    sampling: Sampling = Sampling()
    """How tokens are drawn; at temperature 0 every output is compared with the one without speculation."""
    max_new_tokens: int = 480
    """Cap on an output."""
    seed: int = 30_000
    """Which problems."""

    def __post_init__(self) -> None:
        """Checks the counts and names."""
        if self.problems < 2 * self.batch_size or self.batch_size < 1 or self.max_new_tokens < 1:
            raise ValueError(
                "need batch_size >= 1, at least two batches of problems (for intervals) and max_new_tokens >= 1, not "
                f"{self.batch_size}, {self.problems} and {self.max_new_tokens}"
            )
        if not self.draft_tokens or min(self.draft_tokens) < 1:
            raise ValueError(f"draft_tokens must hold lengths >= 1, not {self.draft_tokens}")
        reserved = {_PLAIN, _NOISED} & set(self.drafters)
        if reserved or any(drafter.kind == "none" for drafter in self.drafters.values()):
            raise ValueError(f"`{_PLAIN}` and `{_NOISED}` are measured anyway; leave them out of drafters")


class _Run(NamedTuple):
    """One engine's outputs, batch by batch."""

    engine: HFEngine
    outputs: list[Output]
    seconds: list[float]
    """Of each batch."""


def benchmark_speculation(config: SpeculationBenchmark) -> dict[str, JSON]:
    """Measures every drafter on the same problems in turns; prints, returns and writes the figures.

    Raises:
        ValueError: A model cannot be loaded, or a drafter belongs to another target.
        OSError: The folder cannot be written.
    """
    with ProvenanceRecorder() as provenance:
        target = load_target(config.target)
        runs = {name: _Run(engine, [], []) for name, engine in _engines(config, target).items()}
        requests = _requests(config, target)
        batches = [requests[i : i + config.batch_size] for i in range(0, len(requests), config.batch_size)]
        for run in runs.values():  # first kernels, caches and allocations belong to nobody
            run.engine.generate([replace(request, max_new_tokens=8) for request in batches[0]])
        names = list(runs)
        for number, batch in enumerate(tqdm(batches, unit="batch", desc="speculation")):
            turn = number % len(names)  # whoever runs first is another one each time
            for name in names[turn:] + names[:turn]:
                _measure(runs[name], batch, target.device)
        figures = {name: _figures(run, runs[_PLAIN], config) for name, run in runs.items()}
        report: dict[str, JSON] = {
            "device": _device_name(target.device),
            "dtype": str(target.output_layer.weight.dtype).removeprefix("torch."),
            "problems": config.problems,
            "batch_size": config.batch_size,
            "sampling": dict(asdict(config.sampling)),
            "drafters": dict(figures),
        }
        table = _table(figures, config)
        print(table)
        write_json(config.output / "speculation.json", report)
        write_text(config.output / "speculation.md", table + "\n")
        provenance.write(config.output)
    return report


def _engines(config: SpeculationBenchmark, target: Target) -> dict[str, HFEngine]:
    def engine(drafter: Drafter | None, draft_tokens: int) -> HFEngine:
        return HFEngine(
            target,
            sampling=config.sampling,
            drafter=drafter,
            num_draft_tokens=draft_tokens,
            batch_size=config.batch_size,
        )

    loaded = {name: load_drafter(drafter, target, config.sampling) for name, drafter in config.drafters.items()}
    if config.noised_copy > 0:
        loaded[_NOISED] = ModelDrafter(
            _noised(target, config.noised_copy), sampling=config.sampling, vocab_size=target.vocab_size
        )
    engines = {_PLAIN: engine(None, 0)}
    return engines | {
        f"{name}, K {k}": engine(drafter, k) for name, drafter in loaded.items() for k in config.draft_tokens
    }


def _noised(target: Target, noise: float) -> Target:
    """A copy of the target with noise on its weights."""
    model = copy.deepcopy(target.model)
    draw = torch.Generator(target.device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            wobble = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=torch.float32)
            weight.add_((noise * weight.float().std() * wobble).to(weight.dtype))
    return Target(model, target.tokenizer, target.markers, name=_NOISED)


def _requests(config: SpeculationBenchmark, target: Target) -> list[Request]:
    examples = build_task(config.task).examples(config.problems, config.seed)
    return [
        Request(
            key=i,
            prompt_ids=tuple(render_prompt(target.tokenizer, e.messages, thinking=True, markers=target.markers)),
            contract=e.contract,
            max_new_tokens=config.max_new_tokens,
        )
        for i, e in enumerate(examples)
    ]


def _measure(run: _Run, batch: Sequence[Request], device: torch.device) -> None:
    start = time.perf_counter()
    run.outputs.extend(run.engine.generate(batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    run.seconds.append(time.perf_counter() - start)


def _figures(run: _Run, plain: _Run, config: SpeculationBenchmark) -> dict[str, JSON]:
    stats = [output.stats for output in run.outputs]
    counts = np.array(
        [[len(o.token_ids), o.stats.verify_steps, o.stats.accepted, o.stats.drafted] for o in run.outputs], dtype=float
    )
    bootstrap = Bootstrap(seed=config.seed)
    sums = bootstrap.sums(counts)
    times = np.array([run.seconds, _tokens(run, config), plain.seconds, _tokens(plain, config)], dtype=float).T
    timed = bootstrap.sums(times)
    tokens, steps, accepted, drafted = counts.sum(0)
    total = times.sum(0)
    most = max(key for stat in stats for key in stat.histogram)
    histogram = [sum(stat.histogram.get(length, 0) for stat in stats) for length in range(most + 1)]
    figures: dict[str, JSON] = {
        "tokens_per_forward": _estimate(tokens / steps, sums[:, 0] / sums[:, 1]),
        "accepted_per_draft": None if not drafted else _estimate(accepted / drafted, sums[:, 2] / sums[:, 3]),
        "seconds_per_token": _estimate(total[0] / total[1], timed[:, 0] / timed[:, 1]),
        "speedup": _estimate(
            (total[2] / total[3]) / (total[0] / total[1]), (timed[:, 2] / timed[:, 3]) / (timed[:, 0] / timed[:, 1])
        ),
        "accepted_histogram": [*histogram],
    }
    if config.sampling.temperature == 0.0:
        same = sum(a.token_ids == b.token_ids for a, b in zip(run.outputs, plain.outputs, strict=True))
        figures["outputs_as_without"] = same
    return figures


def _tokens(run: _Run, config: SpeculationBenchmark) -> list[int]:
    """Output tokens of each batch."""
    lengths = [len(output.token_ids) for output in run.outputs]
    return [sum(lengths[i : i + config.batch_size]) for i in range(0, len(lengths), config.batch_size)]


def _estimate(value: float, resampled: np.ndarray) -> dict[str, JSON]:
    interval = percentile_interval(resampled)
    return {"value": float(value), "low": interval.low, "high": interval.high}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _table(figures: Mapping[str, Mapping[str, JSON]], config: SpeculationBenchmark) -> str:
    """Markdown; brackets are paired bootstrap intervals, over problems and, for times, over batches."""
    lines = [
        f"{config.problems} problems in batches of {config.batch_size}, temperature {config.sampling.temperature:g}. "
        "Brackets: bootstrap 95% intervals, over problems; of times, over batches.",
        "",
        "| drafter | tokens per target forward | drafts accepted | ms per token | time against none |",
        "|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        cells = [
            _cell(row["tokens_per_forward"], 1.0, 2),
            "-" if row["accepted_per_draft"] is None else _cell(row["accepted_per_draft"], 100.0, 1) + " %",
            _cell(row["seconds_per_token"], 1000.0, 2),
            _cell(row["speedup"], 1.0, 2) + " x",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if config.sampling.temperature == 0.0:
        same = [f"{name} {row['outputs_as_without']}" for name, row in figures.items() if name != _PLAIN]
        lines += ["", f"Outputs equal to those without speculation, of {config.problems}: {', '.join(same)}."]
    return "\n".join(lines)


def _cell(estimate: JSON, scale: float, digits: int) -> str:
    assert isinstance(estimate, dict)
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    assert isinstance(value, float)
    assert isinstance(low, float)
    assert isinstance(high, float)
    return f"{value * scale:.{digits}f} [{low * scale:.{digits}f}, {high * scale:.{digits}f}]"

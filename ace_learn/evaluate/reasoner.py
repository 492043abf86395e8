"""What the embedded reasoner can do: the figures that make it a fair test bed for exits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ace_learn.artifacts import JSON, JsonFields, write_json
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.bootstrap import Bootstrap, percentile_interval
from ace_learn.labels.probing import as_problem, label_batch
from ace_learn.labels.records import TraceRecord
from ace_learn.models.target import EMBEDDED, Target, TargetConfig, load_target
from ace_learn.reasoner import Problem as ReasonerProblem
from ace_learn.reasoner import generate_problems
from ace_learn.reasoner.problems import FAMILIES
from ace_learn.tasks.reasoner import problem_example

_STATED = re.compile(r"So the answer is (-?\d+)")
_MAX_NEW_TOKENS, _MAX_ANSWER_TOKENS = 480, 48


@dataclass(frozen=True, kw_only=True)
class ReasonerEvaluation:
    """Measures a reasoner on problems that it was not trained on."""

    model: str = EMBEDDED
    """Folder of the reasoner."""
    problems: int = 1000
    """Problems, in equal shares of the families."""
    temperature: float = 1.0
    """Sampling temperature of the four figures; greedy accuracy is measured besides."""
    greedy_problems: int = 300
    """Problems that are also solved greedily."""
    seed: int = 20_000
    """Which problems, and which noise."""
    batch_size: int = 250
    """Problems decoded together."""
    output: Path | None = None
    """JSON file for the figures."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        if self.problems < 1 or self.batch_size < 1 or self.greedy_problems < 0:
            raise ValueError(
                "need problems >= 1, batch_size >= 1 and greedy_problems >= 0, not "
                f"{self.problems}, {self.batch_size} and {self.greedy_problems}"
            )


@dataclass(frozen=True, kw_only=True)
class Solved:
    """One problem with its trace and the value that the trace stated first."""

    problem: ReasonerProblem
    record: TraceRecord
    first_stated: int | None


def evaluate_reasoner(config: ReasonerEvaluation) -> dict[str, JSON]:
    """Prints, returns and optionally writes the figures.

    Raises:
        ValueError: The model cannot be loaded.
    """
    torch.set_num_threads(1)  # the reasoner is tiny: threads cost more than they give
    target = load_target(TargetConfig(model=config.model, dtype="float32", device="cpu"))
    problems = _problems(config.problems, config.seed)
    sampled = solve(target, problems, Sampling(temperature=config.temperature, seed=config.seed), config.batch_size)
    greedy = solve(target, problems[: config.greedy_problems], Sampling(temperature=0.0), config.batch_size)
    figures: dict[str, JSON] = {"all": family_figures(sampled)}
    for family in FAMILIES:
        figures[family] = family_figures([s for s in sampled if s.problem.family == family])
    for form in ("boxed", "choice", "json"):
        figures[f"format {form}"] = family_figures([s for s in sampled if s.problem.answer_format == form])
    figures["greedy accuracy"] = _interval([s.record.full_correct for s in greedy])
    print(_table(figures))
    if config.output is not None:
        write_json(config.output, figures)
    return figures


def solve(target: Target, problems: Sequence[ReasonerProblem], sampling: Sampling, batch_size: int) -> list[Solved]:
    """Lets the reasoner solve problems and probes every paragraph end."""
    engine = HFEngine(target, sampling=sampling, batch_size=batch_size)
    solved: list[Solved] = []
    with tqdm(total=len(problems), unit="problem", desc=f"temperature {sampling.temperature:g}") as bar:
        for start in range(0, len(problems), batch_size):
            chunk = problems[start : start + batch_size]
            batch = [
                as_problem(
                    start + i,
                    "test",
                    problem_example(problem),
                    target,
                    max_new_tokens=_MAX_NEW_TOKENS,
                    max_answer_tokens=_MAX_ANSWER_TOKENS,
                )
                for i, problem in enumerate(chunk)
            ]
            records = label_batch(engine, batch, rows="boundaries", minimal="first").records
            solved.extend(
                Solved(problem=problem, record=record, first_stated=_first_stated(record, target))
                for problem, record in zip(chunk, records, strict=True)
            )
            bar.update(len(chunk))
    return solved


def _problems(count: int, seed: int) -> list[ReasonerProblem]:
    share = -(-count // len(FAMILIES))
    streams = [list(generate_problems(family, share, seed)) for family in FAMILIES]
    return [problem for group in zip(*streams, strict=True) for problem in group][:count]


def _first_stated(record: TraceRecord, target: Target) -> int | None:
    if record.excluded:
        return None
    found = _STATED.search(target.decode(record.token_ids[record.think_start : record.think_end]))
    return None if found is None else int(found.group(1))


def family_figures(solved: Sequence[Solved]) -> dict[str, JSON]:
    """The four figures of a set of problems, each with a bootstrap 95% interval, and what explains them."""
    usable = [s for s in solved if not s.record.excluded]
    first = [s.record.probe_correct[0] is True if s.record.probe_correct else s.record.full_correct for s in usable]
    repaired = [s.first_stated not in (None, s.problem.value) and s.record.full_correct for s in usable]
    think = np.array([s.record.think_end - s.record.think_start for s in usable], dtype=float)
    minimal = np.array([s.record.minimal_tokens for s in usable], dtype=float)
    return {
        "problems": len(solved),
        "excluded": len(solved) - len(usable),
        "full_accuracy": _interval([s.record.full_correct for s in solved]),
        "closed_after_first_paragraph": _interval(first),
        "first_wrong_then_repaired": _interval(repaired),
        "minimal_exit_saves": _ratio(think - minimal, think),
        "no_think_accuracy": _interval([s.record.no_think_correct for s in usable]),
        "think_tokens_mean": float(think.mean()) if usable else None,
        "boundaries_mean": float(np.mean([len(s.record.boundary) for s in usable])) if usable else None,
    }


def _interval(values: Sequence[bool]) -> JSON:
    return _ratio(np.array(values, dtype=float), np.ones(len(values)))


def _ratio(part: np.ndarray, whole: np.ndarray) -> JSON:
    """sum(part) / sum(whole) with its bootstrap 95% interval; None without data."""
    if not len(whole):
        return None
    sums = Bootstrap().sums(np.stack((part, whole), axis=1))
    interval = percentile_interval(sums[:, 0] / sums[:, 1])
    return {"value": float(part.sum() / whole.sum()), "low": interval.low, "high": interval.high}


def _table(figures: dict[str, JSON]) -> str:
    lines = []
    for name, value in figures.items():
        shown = value if isinstance(value, dict) and "value" not in value else {"": value}
        cells = [f"{key} {_shown(figure)}".strip() for key, figure in shown.items()]
        lines.append(f"{name}: " + "; ".join(cells))
    return "\n".join(lines)


def _shown(figure: JSON) -> str:
    if isinstance(figure, dict):
        value, low, high = (JsonFields.of(figure, where="figure").number(name) for name in ("value", "low", "high"))
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"
    return f"{figure:.1f}" if isinstance(figure, float) else str(figure)

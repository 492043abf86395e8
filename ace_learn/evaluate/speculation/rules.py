"""What acceptance rules give and take: windows and accuracy side by side, and how far the output's law is from q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from ace_learn.artifacts import JSON, ProvenanceRecorder, write_json, write_text
from ace_learn.engines.requests import Output
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.bootstrap import Bootstrap, percentile_interval
from ace_learn.evaluate.speculation.setting import Pair, SpeculationSetting
from ace_learn.models.target import Target
from ace_learn.speculation.rules import AcceptanceConfig, kl_divergence, output_law


@dataclass(frozen=True, kw_only=True)
class RuleStudy:
    """A recipe of `python -m ace_learn.bench rules`."""

    setting: SpeculationSetting = SpeculationSetting()
    """Target, drafter and problems."""
    deltas: list[float] = field(default_factory=lambda: [0.1, 0.75, 1.0])
    """Budgets of cactus and cactus_exact, nats."""
    epsilons: list[float] = field(default_factory=lambda: [0.02, 0.09, 0.3])
    """Thresholds of typical; alpha is the square root."""
    problems: int = 256
    """Problems of each row of the table."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; a token outside has q_n = 0, and no budget
    raises it."""
    enumerated_rows: int = 150
    """Verified rows whose output law is enumerated."""
    batch_size: int = 128
    """Requests decoded together."""
    output: Path | None = None
    """Folder for table.md and results.json."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.problems < 2 or self.temperature <= 0.0 or self.enumerated_rows < 1 or self.batch_size < 1:
            raise ValueError("need problems >= 2, temperature > 0, enumerated_rows >= 1 and batch_size >= 1")
        self.rules()
        self.sampling()

    def sampling(self) -> Sampling:
        """How both models draw."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.setting.seed)

    def rules(self) -> dict[str, AcceptanceConfig]:
        """The rows of the table."""
        rules = {"standard": AcceptanceConfig()}
        rules |= {f"typical {e:g}": AcceptanceConfig(rule="typical", epsilon=e) for e in self.epsilons}
        rules |= {f"cactus {d:g}": AcceptanceConfig(rule="cactus", delta=d) for d in self.deltas}
        return rules | {f"cactus_exact {d:g}": AcceptanceConfig(rule="cactus_exact", delta=d) for d in self.deltas}


class _Run(NamedTuple):
    """One rule's outcome, per problem."""

    tokens: Float[ndarray, " n"]
    steps: Float[ndarray, " n"]
    correct: Float[ndarray, " n"]
    kl: Float[ndarray, " n"]


def study_rules(config: RuleStudy) -> dict[str, JSON]:
    """Decodes the problems under every rule; prints, returns and optionally writes the table.

    Acceptance length is tokens emitted per verify step; intervals are 95% bootstrap intervals over problems, paired
    with `standard` in the differences.

    Raises:
        ValueError: A model cannot be loaded.
    """
    with ProvenanceRecorder() as recorder:
        pair = Pair(config.setting)
        sampling = config.sampling()
        examples, requests = pair.problems(config.problems)
        runs: dict[str, _Run] = {}
        outputs: list[Output] = []
        for name, rule in config.rules().items():
            engine = pair.engine(sampling, acceptance=rule, batch_size=config.batch_size)
            decoded = engine.generate(requests)
            outputs = outputs or decoded
            judged = [e.correct(o.answer) for e, o in zip(examples, decoded, strict=True)]
            runs[name] = _run(decoded, judged)
        laws = _laws(pair, outputs, sampling, config.enumerated_rows)
        rows: dict[str, JSON] = {
            name: _row(runs[name], runs["standard"]) | _drift(laws, rule) for name, rule in config.rules().items()
        }
        table = _table(rows)
        print(table)
        if config.output is not None:
            write_text(config.output / "table.md", table + "\n")
            write_json(config.output / "results.json", rows)
            recorder.write(config.output)
    return rows


def _run(outputs: Sequence[Output], correct: Sequence[bool]) -> _Run:
    columns = [
        (len(o.token_ids), o.stats.verify_steps, float(c), o.stats.kl_spent)
        for o, c in zip(outputs, correct, strict=True)
    ]
    return _Run(*np.array(columns, dtype=np.float64).T)


def _row(run: _Run, base: _Run) -> dict[str, JSON]:
    columns = np.stack([*run, *base, np.ones_like(run.tokens)], axis=1)
    sums = np.concatenate((columns.sum(0, keepdims=True), Bootstrap().sums(columns)))
    tokens, steps, correct, kl = sums[:, :4].T
    base_tokens, base_steps, base_correct, _, count = sums[:, 4:].T
    figures = {
        "tokens_per_step": tokens / steps,
        "tokens_per_step_gain": tokens / steps - base_tokens / base_steps,
        "accuracy": correct / count,
        "accuracy_change": (correct - base_correct) / count,
        "tokens": tokens / count,
        "kl_per_token": kl / tokens,
    }
    return {
        name: {"value": float(values[0]), "interval": [*map(float, percentile_interval(values[1:]))]}
        for name, values in figures.items()
    }


class Laws(NamedTuple):
    """Target and draft laws of real rows."""

    q: Float[Tensor, "n V"]
    p: Float[Tensor, "n V"]


def _laws(pair: Pair, outputs: Sequence[Output], sampling: Sampling, count: int) -> Laws | None:
    """Rows at random positions of outputs; None with a drafter that is no language model of its own."""
    if pair.noised is None:
        return None
    _, requests = pair.problems(len(outputs))
    draw, share = np.random.default_rng(0), 10
    q, p = [], []
    for i in range(-(-count // share)):
        ids = [*requests[i % len(requests)].prompt_ids, *outputs[i % len(outputs)].token_ids]
        at = draw.integers(len(requests[i % len(requests)].prompt_ids), len(ids), share) - 1
        q.append(_law(pair.target, ids, sampling)[at])
        p.append(_law(pair.noised, ids, sampling)[at])
    return Laws(torch.cat(q)[:count], torch.cat(p)[:count])


def _law(model: Target, ids: Sequence[int], sampling: Sampling) -> Float[Tensor, "T V"]:
    tokens = torch.tensor([list(ids)], device=model.device)
    positions = torch.arange(len(ids), device=model.device)[None]
    logits = model.forward(tokens, positions, model.new_cache(1), longest=len(ids)).logits[0]
    return sampling.probabilities(logits.double())


def _drift(laws: Laws | None, rule: AcceptanceConfig) -> dict[str, JSON]:
    """KL of the output's exact law to q, over the rows."""
    if laws is None:
        return {}
    drift = torch.cat(
        [kl_divergence(output_law(q, p, rule), q) for q, p in zip(laws.q.split(1), laws.p.split(1), strict=True)]
    )
    return {"output_kl_mean": float(drift.mean()), "output_kl_max": float(drift.max())}


def _table(rows: dict[str, JSON]) -> str:
    lines = [
        "| rule | tokens per step | gain | accuracy | change | nats spent per token | KL of the output, mean (max) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        assert isinstance(row, dict)
        drift = "not enumerated"
        if isinstance(mean := row.get("output_kl_mean"), float) and isinstance(top := row["output_kl_max"], float):
            drift = f"{mean:.4f} ({top:.3f})"
        shown = [
            _shown(row["tokens_per_step"], ".2f"),
            _shown(row["tokens_per_step_gain"], "+.2f"),
            _shown(row["accuracy"], ".3f"),
            _shown(row["accuracy_change"], "+.3f"),
            _shown(row["kl_per_token"], ".4f"),
        ]
        lines.append(f"| {name} | {' | '.join(shown)} | {drift} |")
    return "\n".join(lines)


def _shown(figure: JSON, form: str) -> str:
    assert isinstance(figure, dict)
    interval = figure["interval"]
    assert isinstance(interval, list)
    low, high = interval
    return f"{figure['value']:{form}} [{low:{form}}, {high:{form}}]"

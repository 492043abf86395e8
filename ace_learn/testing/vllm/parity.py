"""Greedy outputs of vLLM with exits: the same with and without drafts, whatever the scheduler does, and as in HF."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from tqdm import tqdm

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.exit.policy import ExitPolicy, load_policy
from ace_learn.heads.export import load_head
from ace_learn.json_type import JSON
from ace_learn.models.target import EMBEDDED, Target, TargetConfig, load_target
from ace_learn.reasoner import weights_path
from ace_learn.tasks import TaskConfig, build_task, render_prompt
from ace_learn.testing.vllm.cells import Cell, CellRequest, CellResult, Mode, run_cell, run_interpreted
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import TinyModels, tiny_prompts, write_noisy_copy, write_tiny_models
from ace_learn.testing.vllm.speculation import Drafting, speculation_of

Part = Literal["v1", "v2", "reasoner"]
_KINDS: tuple[dict[str, JSON] | None, ...] = (
    {"ace_enabled": True},
    {"ace_enabled": True, "ace_min_thinking_tokens": 20},
    {"ace_enabled": True, "ace_patience": 2},
    None,
    {"ace_enabled": True},
    {"ace_enabled": True, "ace_min_thinking_tokens": 12},
    {"ace_enabled": True, "ace_shadow": True},
    {"ace_enabled": True},
)
"""Settings of the requests, in turn; None: a plain request."""
_LEAST_TOKENS = 24
_REASONER_NOISE = 0.08


@dataclass(frozen=True, kw_only=True)
class ParityBenchmark:
    """Which engines are compared."""

    engine: Literal["vllm"] = "vllm"
    """What is compared with the HF reference engine."""
    parts: tuple[Part, ...] = ("v1", "v2", "reasoner")
    """`v1` (the first model runner), `v2` (Model Runner V2, interpreted) and `reasoner` (the embedded model, on V1)."""
    draftings: tuple[Drafting, ...] = ("none", "draft_model", "self", "ngram", "eagle3", "mtp")
    """v1: ways of drafting; `none` is always among them."""
    modes: tuple[Mode, ...] = ("plain", "chunked", "async")
    """v1: `plain`, `chunked` (chunked prefill, and so little memory that requests are preempted), `async`."""
    requests: int = 24
    """Requests per engine, with mixed settings."""
    max_tokens: int = 96
    """Longest output of a tiny model; a half of it on V2, whose kernels are interpreted."""
    draft_tokens: int = 4
    """Drafted tokens per step, K."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if not self.parts or len(set(self.parts)) != len(self.parts):
            raise ValueError(f"parts must be one or more of v1, v2, reasoner, each once, not {list(self.parts)}")
        if "none" not in self.draftings or "plain" not in self.modes:
            raise ValueError("draftings must hold none, and modes plain, with which the others are compared")
        if self.requests < len(_KINDS) or self.max_tokens < 2 * _LEAST_TOKENS or self.draft_tokens < 2:
            raise ValueError(
                f"need requests >= {len(_KINDS)}, max_tokens >= {2 * _LEAST_TOKENS} and draft_tokens >= 2, not "
                f"{self.requests}, {self.max_tokens} and {self.draft_tokens}"
            )


class Group(NamedTuple):
    """A target with its head, what is asked, and what every engine must answer."""

    name: str
    model: Path
    head: Path
    requests: tuple[CellRequest, ...]
    expected: list[list[int]]
    """By the HF reference engine."""
    full: list[list[int]]
    """By the same without exits."""


class Row(NamedTuple):
    """A cell and its result, as the table shows it."""

    runner: str
    group: Group
    cell: Cell
    result: CellResult
    same_as_none: int
    """Requests whose tokens are those of the same engine without drafts, on the first runner."""
    same_as_hf: int
    exits: int
    """By the audit records."""
    differing: int
    """Requests whose tokens are others than without exits."""


def compare_engines(config: ParityBenchmark) -> None:
    """Runs the matrix and prints it.

    Raises:
        SystemExit: With status 1, where something that is required was missed; it is printed.
        ValueError: vLLM is not installed.
    """
    with TemporaryDirectory(prefix="ace-learn-parity-") as folder:
        rows = run_matrix(config, Path(folder))
    print(table(rows))
    failures = [failure for row in rows for failure in failures_of(row)]
    failures += failures_over_all(rows)
    for failure in failures:
        print(f"failed: {failure}")
    if failures:
        sys.exit(1)
    print(f"{len(rows)} engines: all required")


def run_matrix(config: ParityBenchmark, folder: Path) -> list[Row]:
    """Runs all cells; models are written into a folder."""
    models = write_tiny_models(folder / "tiny")
    rows: list[Row] = []
    if "v1" in config.parts:
        tiny = tiny_group("qwen3", models.target, folder / "head", config.requests, config.max_tokens)
        mimo = tiny_group("mimo", models.mimo, folder / "mimo-head", config.requests, config.max_tokens)
        rows += _run("V1", _v1_cells(config, models, tiny, mimo))
    if "v2" in config.parts:
        short = tiny_group("qwen3", models.target, folder / "v2-head", config.requests, config.max_tokens // 2)
        rows += _run("V2", _v2_cells(config, models, short))
    if "reasoner" in config.parts:
        rows += _run("V1", _reasoner_cells(config, folder))
    return rows


def tiny_group(name: str, model: Path, head: Path, count: int, max_tokens: int) -> Group:
    """A tiny target, prompts and outputs of several lengths, and what the HF engine makes of them.

    Args:
        name: For the table.
        model: Folder of the target.
        head: Folder for the head.
        count: Requests; their settings are mixed, see `_KINDS`.
        max_tokens: Longest output.
    """
    target = load_target(TargetConfig(model=str(model), dtype="float32", device="cpu"))
    prompts = tiny_prompts(count, longest=48)
    lengths = [max_tokens - 5 * (i % 4) for i in range(count)]
    asked = [_hf(i, ids, n) for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))]
    write_test_head(head, target, asked, share=0.9)
    requests = tuple(
        CellRequest(prompt_ids=tuple(ids), max_tokens=n, extra_args=_KINDS[i % len(_KINDS)])
        for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))
    )
    return _with_reference(name, model, head, target, requests)


def _hf(key: int, ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> Request:
    return Request(
        key=key, prompt_ids=tuple(ids), max_new_tokens=max_tokens, min_tokens=max_tokens if ignore_eos else 0
    )


def _with_reference(name: str, model: Path, head: Path, target: Target, requests: tuple[CellRequest, ...]) -> Group:
    """Asks the HF engine, each kind of request with the policy that it comes to."""
    loaded = load_head(head, expect=target.identity)
    signaller = HeadSignaller(loaded.head, loaded.spec, target.device)
    policy = load_policy(head)
    asked = [_hf(i, r.prompt_ids, r.max_tokens, ignore_eos=r.ignore_eos) for i, r in enumerate(requests)]
    greedy = Sampling(temperature=0.0)
    full = [list(output.token_ids) for output in HFEngine(target, sampling=greedy).generate(asked)]
    expected = list(full)
    for kind in (kind for i, kind in enumerate(_KINDS) if kind not in _KINDS[:i]):
        own = [i for i, request in enumerate(requests) if request.extra_args == kind]
        if kind is None or kind.get("ace_shadow") or not own:
            continue
        policy_of_kind = _overridden(policy, kind)
        engine = HFEngine(target, sampling=greedy, policy=policy_of_kind, signaller=signaller)
        for i, output in zip(own, engine.generate([asked[i] for i in own]), strict=True):
            expected[i] = list(output.token_ids)
    return Group(name, model, head, requests, expected, full)


def _overridden(policy: ExitPolicy, kind: Mapping[str, JSON]) -> ExitPolicy:
    least, patience = kind.get("ace_min_thinking_tokens"), kind.get("ace_patience")
    return replace(
        policy,
        min_thinking_tokens=least if isinstance(least, int) else policy.min_thinking_tokens,
        patience=patience if isinstance(patience, int) else policy.patience,
    )


def _cell(group: Group, name: Drafting, speculation: dict[str, JSON] | None, mode: Mode = "plain") -> Cell:
    return Cell(
        name=name,
        model=str(group.model),
        settings={"head": str(group.head)},
        speculation=speculation,
        mode=mode,
        requests=group.requests,
    )


def _v1_cells(config: ParityBenchmark, models: TinyModels, tiny: Group, mimo: Group) -> list[tuple[Group, Cell]]:
    """All ways of drafting and scheduling; vLLM refuses asynchronous scheduling with n-grams that a CPU looks up."""
    cells = []
    for mode, name in product(config.modes, config.draftings):
        if (name, mode) == ("ngram", "async") or (name == "self" and mode != "plain"):
            continue
        if name == "mtp":
            cells.append((mimo, _cell(mimo, "none", None, mode)))
        group = mimo if name == "mtp" else tiny
        cells.append((group, _cell(group, name, speculation_of(name, models, config.draft_tokens), mode)))
    return cells


def _v2_cells(config: ParityBenchmark, models: TinyModels, tiny: Group) -> list[tuple[Group, Cell]]:
    """The interpreter pays per step, so that all requests run together; n-grams do not run on it."""
    names: tuple[Drafting, ...] = ("none", "draft_model", "eagle3")
    return [(tiny, _cell(tiny, name, speculation_of(name, models, config.draft_tokens))) for name in names]


def _reasoner_cells(config: ParityBenchmark, folder: Path) -> list[tuple[Group, Cell]]:
    """Problems of the embedded reasoner, with a test head and a noisy copy of the model as its draft."""
    target = load_target(TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"))
    prompts = [
        render_prompt(target.tokenizer, example.messages, thinking=True, markers=target.markers)
        for example in build_task(TaskConfig()).examples(config.requests, 0)
    ]
    head, longest = folder / "reasoner-head", 256
    asked = [_hf(i, ids, longest, ignore_eos=False) for i, ids in enumerate(prompts)]
    write_test_head(head, target, asked, share=0.9)
    requests = tuple(
        CellRequest(prompt_ids=tuple(ids), max_tokens=longest, ignore_eos=False, extra_args=_KINDS[i % len(_KINDS)])
        for i, ids in enumerate(prompts)
    )
    group = _with_reference("reasoner", weights_path(), head, target, requests)
    noisy = write_noisy_copy(folder / "reasoner-noisy", target, _REASONER_NOISE)
    draft: dict[str, JSON] = {
        "method": "draft_model", "model": str(noisy), "num_speculative_tokens": config.draft_tokens,
    }  # fmt: skip
    return [(group, _cell(group, "none", None)), (group, _cell(group, "draft_model", draft))]


def _run(runner: str, cells: Sequence[tuple[Group, Cell]]) -> list[Row]:
    if runner == "V2":
        results = run_interpreted([cell for _, cell in cells])
    else:
        results = [run_cell(cell) for _, cell in tqdm(cells, desc=runner, unit="engine")]
    none = {
        group.name: result.token_ids
        for (group, cell), result in zip(cells, results, strict=True)
        if cell.speculation is None and cell.mode == "plain"
    }
    return [
        Row(
            runner=runner,
            group=group,
            cell=cell,
            result=result,
            same_as_none=_same(result.token_ids, none[group.name]),
            same_as_hf=_same(result.token_ids, group.expected),
            exits=sum(audit.get("reason") == "policy" for audit in result.audits),
            differing=len(group.full) - _same(result.token_ids, group.full),
        )
        for (group, cell), result in zip(cells, results, strict=True)
    ]


def _same(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(found, expected, strict=True))


def failures_of(row: Row) -> list[str]:
    """What one engine should have shown and did not."""
    watched, asked = row.result.watched, len(row.group.requests)
    required = {
        f"{row.same_as_none}/{asked} outputs are those without drafts": row.same_as_none == asked,
        f"{row.same_as_hf}/{asked} outputs are those of the HF engine": row.same_as_hf == asked,
        f"only {row.exits} of {asked} requests exit": 2 * row.exits >= asked,
        f"{row.exits} exits in the audits, {watched.exits} in the engine": row.exits == watched.exits,
        "no output differs from the one without exits": row.differing > 0,
        f"the hook gave up {watched.failures} requests": watched.failures == 0,
        f"{watched.tokens_per_step:.2f} tokens per verify step": (
            row.cell.speculation is None or watched.tokens_per_step > 1
        ),
        "nothing was preempted": row.cell.mode != "chunked" or watched.preemptions > 0,
    }
    where = f"{row.runner} {row.group.name} {row.cell.name} {row.cell.mode}"
    return [f"{where}: {what}" for what, holds in required.items() if not holds]


def failures_over_all(rows: Sequence[Row]) -> list[str]:
    """What the engines of one runner should have shown together."""
    runners = {row.runner for row in rows}
    return [
        f"{runner}: no exit inside an accepted window"
        for runner in sorted(runners)
        if not sum(row.result.watched.inside for row in rows if row.runner == runner)
    ]


def table(rows: Sequence[Row]) -> str:
    """The matrix, a line per engine."""
    lines = [
        f"{'runner':6} {'target':8} {'drafts':11} {'mode':7} {'= none':>7} {'= HF':>7} {'exits':>5} {'inside':>6} "
        f"{'discarded':>9} {'tokens/step':>11} {'preempted':>9} {'!= full':>7}"
    ]
    for row in rows:
        watched, asked = row.result.watched, len(row.group.requests)
        lines.append(
            f"{row.runner:6} {row.group.name:8} {row.cell.name:11} {row.cell.mode:7} "
            f"{f'{row.same_as_none}/{asked}':>7} {f'{row.same_as_hf}/{asked}':>7} {row.exits:5} {watched.inside:6} "
            f"{watched.discarded:9} {watched.tokens_per_step:11.2f} {watched.preemptions:9} {row.differing:7}"
        )
    lines.append(
        "inside: exits behind an accepted draft and before a further one; discarded: rows that fired behind a rejected "
        "draft; != full: outputs that differ from those without exits"
    )
    return "\n".join(lines)

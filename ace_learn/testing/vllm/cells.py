"""One cell of a matrix of engines: which model, which drafts, which mode of scheduling; and what came of its requests.

`python -m ace_learn.testing.vllm.interpreted JOBS.json RESULTS.json` runs cells on Model Runner V2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from ace_learn.json_type import JSON
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.testing.vllm.planted import late_rows
from ace_learn.testing.vllm.watch import Watched, watching

Mode = Literal["plain", "chunked", "async"]
"""`chunked`: prompts in chunks and so little memory that requests are preempted; `async`: asynchronous scheduling."""
_MODES: dict[Mode, dict[str, int | bool]] = {
    "plain": {},
    "chunked": {
        "block_size": 32,
        "max_model_len": 160,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 12,
        "enable_chunked_prefill": True,
    },
    "async": {"async_scheduling": True},
}


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """What an engine is asked."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    extra_args: dict[str, JSON] | None = None
    """The plugin's keys; None: a plain request."""
    ignore_eos: bool = True
    temperature: float = 0.0
    params: dict[str, JSON] = field(default_factory=dict)
    """Further sampling parameters."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One engine and its requests."""

    name: str
    """Of the way of drafting, for the table."""
    model: str
    settings: dict[str, JSON] | None
    speculation: dict[str, JSON] | None
    mode: Mode = "plain"
    requests: tuple[CellRequest, ...] = field(repr=False)
    options: dict[str, JSON] = field(default_factory=dict)
    """Further arguments of the engine."""
    late: bool = False
    """Plant a fault: exits are forced one row late (`late_rows`)."""


class CellResult(NamedTuple):
    """What came of it, in the order of the requests."""

    token_ids: list[list[int]]
    audits: list[dict[str, JSON]]
    """Empty where there is none."""
    watched: Watched


def run_cell(cell: Cell) -> CellResult:
    """Starts the engine, asks everything at once, and shuts it down."""
    options: dict[str, object] = {**_MODES[cell.mode], **cell.options}
    asynchronous = bool(options.pop("async_scheduling", False))
    with running_engine(
        cell.model,
        settings=cell.settings,
        speculation=cell.speculation,
        async_scheduling=asynchronous,
        **options,
    ) as llm:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in cell.requests]
        params = [
            SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_eos,
                extra_args=request.extra_args,
                **request.params,
            )
            for request in cell.requests
        ]
        with watching(llm) as watched, late_rows() if cell.late else nullcontext():
            outputs = llm.generate(prompts, params, use_tqdm=False)
    return CellResult(
        [list(output.outputs[0].token_ids) for output in outputs],
        [dict((output.kv_transfer_params or {}).get("ace_learn") or {}) for output in outputs],
        watched,
    )


def run_interpreted(cells: Sequence[Cell], *, timeout_s: float = 7200.0) -> list[CellResult]:
    """Runs cells on Model Runner V2, in a process of its own, since Triton must be told before it is imported.

    Raises:
        ValueError: The process fails; its last lines are in the message.
    """
    with TemporaryDirectory() as folder:
        jobs, results = Path(folder) / "jobs.json", Path(folder) / "results.json"
        jobs.write_text(json.dumps([asdict(cell) for cell in cells]))
        command = [sys.executable, "-m", "ace_learn.testing.vllm.interpreted", str(jobs), str(results)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            raise ValueError(f"the run on Model Runner V2 failed:\n{done.stderr[-4000:]}")
        return [
            CellResult(item["token_ids"], item["audits"], Watched(**item["watched"]))
            for item in json.loads(results.read_text())
        ]


def read_cells(path: Path) -> list[Cell]:
    """Reads what `run_interpreted` wrote."""
    return [
        Cell(**item | {"requests": tuple(CellRequest(**request) for request in item["requests"])})
        for item in json.loads(path.read_text())
    ]


def write_results(path: Path, results: Sequence[CellResult]) -> None:
    """Writes what `run_interpreted` reads."""
    path.write_text(json.dumps([{**result._asdict(), "watched": asdict(result.watched)} for result in results]))

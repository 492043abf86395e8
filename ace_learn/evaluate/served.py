"""A data set against a server: valid answers per second with contract exits and without, and what an exit costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ace_learn.artifacts import atomic_file
from ace_learn.engines.server import ChatRequest, ServerConfig
from ace_learn.evaluate.served_report import Arm, ServedRun, summary, write_report
from ace_learn.tasks import TaskConfig, build_task

if TYPE_CHECKING:
    from ace_learn.engines.stream import StreamClient
    from ace_learn.tasks.base import Example

_MOST_PROBLEMS = 100_000
"""An endless task would draw them all before the first is sent."""
_ROUNDS = 4
"""A block of requests is so many times as large as the number under way at a time."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig(ServerConfig):
    """A recipe of `python -m ace_learn.stream`."""

    task: TaskConfig = TaskConfig()
    """Where the problems come from."""
    problems: int = 32
    """How many of the task's problems to send."""
    max_new_tokens: int = 4096
    """Cap on a request's output, thinking included."""
    starts_in_think: bool = False
    """The server's chat template opens the think block, and the thinking comes in the answer's own channel. Leave it
    off where the server sends the thinking apart (reasoning_content)."""
    compare: bool = True
    """Send each problem a second time and read on to the end, as a plain client does."""
    surplus_problems: int = 8
    """Problems sent once more, one at a time, to read off the server's own metrics (vLLM's) what it generates past the
    commit; the server must have no other client then. 0, or a server without such metrics: left out."""
    output: Path | None = None
    """JSONL file with a line for each output; it must not exist, and appears when all are done."""
    report: Path | None = None
    """HTML page with the figures, measured speed-ups beside predicted ones; it must not exist."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        super().__post_init__()
        if not 1 <= self.problems <= _MOST_PROBLEMS:
            raise ValueError(f"problems must be from 1 to {_MOST_PROBLEMS:,}, not {self.problems:,}")
        if self.max_new_tokens < 1 or self.surplus_problems < 0:
            raise ValueError(
                "need max_new_tokens >= 1 and surplus_problems >= 0, not "
                f"{self.max_new_tokens} and {self.surplus_problems}"
            )


def stream(config: StreamConfig) -> ServedRun:
    """Sends a task's problems to a server and prints the figures.

    Raises:
        ValueError: The client is not installed, the server refuses everything, or the recipe is contradictory.
        OSError: The output cannot be written; that is found before anything is sent.
    """
    if find_spec("openai") is None:
        raise ValueError("asking a server needs its client: pip install 'ace-learn[stream]'")
    for name, path in (("output", config.output), ("report", config.report)):
        if path is not None and path.exists():
            raise ValueError(f"{path} exists already; name another --{name} or delete it")
    examples = list(build_task(config.task).examples(config.problems, config.seed))
    with nullcontext() if config.output is None else atomic_file(config.output) as file:
        run = asyncio.run(_ask(config, examples, file))
    print(summary(run))
    if config.report is not None:
        write_report(config.report, run)
    return run


async def _ask(config: StreamConfig, examples: Sequence[Example], file: TextIO | None) -> ServedRun:
    from tqdm import tqdm

    from ace_learn.engines.stream import StreamClient

    requests = [_request(config, key, example) for key, example in enumerate(examples)]
    arms = [Arm(exits=True), *([Arm(exits=False)] if config.compare else [])]
    size = config.concurrency * _ROUNDS
    async with StreamClient(config) as client:
        await client.model()
        with tqdm(total=len(requests) * len(arms), unit="request", desc="stream") as bar:
            for number, start in enumerate(range(0, len(requests), size)):
                # Each way goes first in turn: the server may keep the prompts of the one for the other.
                for arm in arms if number % 2 == 0 else arms[::-1]:
                    block = requests[start : start + size]
                    await _ask_block(client, arm, block)
                    _settle(arm, [request.key for request in block], examples, file)
                    bar.update(len(block))
        past_commit = await _past_commit(client, requests[: config.surplus_problems])
    families = tuple(example.family for example in examples)
    return ServedRun(arms[0], arms[1] if config.compare else None, families, past_commit)


def _request(config: StreamConfig, key: int, example: Example) -> ChatRequest:
    return ChatRequest(
        key=key,
        messages=example.messages,
        contract=example.contract,
        max_new_tokens=config.max_new_tokens,
        starts_in_think=config.starts_in_think,
    )


async def _ask_block(client: StreamClient, arm: Arm, requests: Sequence[ChatRequest]) -> None:
    first = not arm.outputs
    start = time.perf_counter()
    async for output in client.ask_all(requests, exits=arm.exits):
        arm.outputs[output.key] = output
    arm.elapsed_s += time.perf_counter() - start
    failed = [output.error for output in arm.outputs.values() if output.error is not None]
    if first and len(failed) == len(requests):
        raise ValueError(f"none of the first {len(requests)} requests got through: {failed[0]}")


def _settle(arm: Arm, keys: Sequence[int], examples: Sequence[Example], file: TextIO | None) -> None:
    """Scores a block and writes it down, while nothing is under way."""
    for key in keys:
        output = arm.outputs[key]
        arm.correct[key] = examples[key].correct(output.answer)
        if file is not None:
            line = {**asdict(output), "contract_exit": arm.exits, "correct": arm.correct[key]}
            file.write(json.dumps(line) + "\n")
    if file is not None:
        file.flush()


async def _past_commit(client: StreamClient, requests: Sequence[ChatRequest]) -> tuple[int, ...] | None:
    from ace_learn.engines.server_metrics import read_quiet_state, read_state

    if not requests or await read_state(client.config.base_url) is None:
        return None
    past = []
    for request in requests:
        before = await read_quiet_state(client.config.base_url)
        output = await client.ask(request)
        after = await read_quiet_state(client.config.base_url)
        if before is None or after is None:
            return None
        if output.finish_reason == "contract":
            past.append(round(after.generated - before.generated) - output.lost_tokens - output.kept_tokens)
    return tuple(past)

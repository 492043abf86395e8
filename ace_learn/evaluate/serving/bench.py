"""A data set's test problems against a server of our own: exits off, on, and a budget at the oracle exit, in one run.

The order of concurrencies and arms is drawn for every block of problems, what is compared follows on one another, and
every second round goes the other way: what else the machine does falls on all arms alike, and a drift of its speed
cancels out. Each round has a server of its own, since processes differ more than blocks do.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from ace_learn.artifacts import (
    JSON,
    JsonFields,
    ProvenanceRecorder,
    atomic_folder,
    config_json,
    dump_config,
    read_fields,
    write_json,
    write_text,
)
from ace_learn.engines.server import ServerConfig
from ace_learn.engines.server_metrics import read_metric
from ace_learn.engines.vllm.command import ServeConfig, ServedDrafter, ServedTarget
from ace_learn.engines.vllm.settings import Settings
from ace_learn.evaluate.live import load_records
from ace_learn.evaluate.serving.arms import ARMS, ArmName, ArmRun, request_of
from ace_learn.evaluate.serving.figures import ArmFigures, Ratios, figures_of, ratios_of, table
from ace_learn.evaluate.serving.process import running_server
from ace_learn.exit.policy import load_policy
from ace_learn.labels.records import TraceRecord
from ace_learn.models.target import EMBEDDED

_EXITS = 'ace_learn_exits_total{reason="policy"}'
_WARM_UP = 4
"""Problems per arm that are sent first and not counted."""


@dataclass(frozen=True, kw_only=True)
class ServeBenchmark:
    """What is served, and what is asked."""

    head: Path
    """Head folder with its policy."""
    dataset: Path
    """Data set of the same target; its test problems are asked, and their labels say where the oracle exits."""
    output: Path
    """Folder for the results; it must not exist."""
    model: str = EMBEDDED
    """Folder or hub id of the target."""
    drafter: ServedDrafter = ServedDrafter()
    """Speculation, the same in all arms."""
    compile: bool = True
    """Compile the exit rule (the server's setting of that name); without a drafter a CPU has nothing to compile."""
    problems: int = 200
    """Test problems."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Requests under way at a time."""
    block: int = 40
    """Problems that are sent in one way before they are sent in the next."""
    rounds: int = 2
    """Servers, one after another, each of which gets every problem in each way; every second one in opposite order."""
    seed: int = 0
    """Of the order, and of the requests' sampling."""
    least_token_ratio: float = 1.5
    """Fail where full thinking does not take so many times the tokens."""
    least_share: float = 0.85
    """Fail where the ratio of latencies is not so large a share of the ratio of tokens."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if self.problems < 2 or min(self.block, self.rounds) < 1 or not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(
                "need problems >= 2, block >= 1, rounds >= 1 and each concurrency >= 1, not "
                f"{self.problems}, {self.block}, {self.rounds} and {list(self.concurrency)}"
            )
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"each concurrency once, not {list(self.concurrency)}")


def bench_serve(config: ServeBenchmark) -> None:
    """Starts the server, asks everything, prints the table and writes it with its provenance.

    Raises:
        ValueError: The server does not start or fails, or the data set has too few test problems.
        SystemExit: With status 1, where exits save less than the recipe asks for; after all is written.
    """
    with ProvenanceRecorder({"head": config.head, "dataset": config.dataset}) as provenance:
        records = list(load_records(config.dataset, "test"))[: config.problems]
        if len(records) < config.problems:
            raise ValueError(f"{config.dataset} has {len(records)} test problems, fewer than {config.problems}")
        settings = read_fields(config.dataset / "dataset.json")
        with atomic_folder(config.output) as folder:
            runs = _run(config, records, settings, folder)
            figures = [figures_of(run) for run in runs.values()]
            ratios = [
                ratios_of(runs[level, "full"], runs[level, arm])
                for level, arm in product(config.concurrency, ARMS)
                if arm != "full"
            ]
            missed = _missed(config, ratios)
            write_text(folder / "report.md", table(figures, ratios) + "\n")
            write_json(folder / "report.json", _json(config, figures, ratios, missed))
            write_text(folder / "config.yaml", dump_config(config))
            provenance.write(folder)
    print(table(figures, ratios))
    for what in missed:
        print(f"missed: {what}")
    if missed:
        sys.exit(1)


def _run(
    config: ServeBenchmark, records: Sequence[TraceRecord], settings: JsonFields, folder: Path
) -> dict[tuple[int, ArmName], ArmRun]:
    runs = {(level, arm): ArmRun(arm=arm, concurrency=level) for level, arm in product(config.concurrency, ARMS)}
    served = ServeConfig(
        target=ServedTarget(model=config.model, dtype="float32"),
        settings=Settings(head=str(config.head), compile=config.compile),
        drafter=config.drafter,
        vllm={
            "max_num_seqs": max(config.concurrency),
            "max_model_len": 1024,
            "enforce_eager": True,
            "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
        },
    )
    with tqdm(total=config.rounds * len(records) * len(runs), unit="request", desc="serve") as bar:
        for number in range(config.rounds):
            with running_server(served, folder / f"server-{number}.log") as base_url:
                asyncio.run(_ask_all(config, base_url, runs, records, settings, number, bar))
    return runs


async def _ask_all(
    config: ServeBenchmark,
    base_url: str,
    runs: dict[tuple[int, ArmName], ArmRun],
    records: Sequence[TraceRecord],
    settings: JsonFields,
    number: int,
    bar: tqdm[NoReturn],
) -> None:
    """One round."""
    longest = settings.integer("max_new_tokens")
    sampling = settings.fields("sampling")
    for arm in ARMS:
        await _ask(config, base_url, ArmRun(arm=arm, concurrency=1), records[:_WARM_UP], longest, sampling)
    for start in range(0, len(records), config.block):
        block = records[start : start + config.block]
        for key in _order(config, start, number):
            await _ask(config, base_url, runs[key], block, longest, sampling)
            bar.update(len(block))


def _order(config: ServeBenchmark, start: int, number: int) -> list[tuple[int, ArmName]]:
    """In which ways a block is sent in a round, one after another."""
    draw = random.Random(f"{config.seed} {start}")
    levels = draw.sample(config.concurrency, len(config.concurrency))
    ways = [(level, arm) for level in levels for arm in draw.sample(ARMS, len(ARMS))]
    return ways if number % 2 == 0 else ways[::-1]


async def _ask(
    config: ServeBenchmark,
    base_url: str,
    run: ArmRun,
    records: Sequence[TraceRecord],
    longest: int,
    sampling: JsonFields,
) -> None:
    """Sends a block in one way."""
    from ace_learn.engines.stream import StreamClient

    server = ServerConfig(
        base_url=base_url,
        concurrency=run.concurrency,
        count="continuous_usage",
        temperature=sampling.number("temperature"),
        top_p=sampling.number("top_p"),
        seed=config.seed,
        retries=0,
        body={"skip_special_tokens": False, "top_k": sampling.integer("top_k")},
    )
    before = await read_metric(base_url, _EXITS)
    async with StreamClient(server) as client:
        await client.model()
        start = time.perf_counter()
        async for output in client.ask_all([request_of(run.arm, r, longest) for r in records], exits=False):
            run.add(output)
        run.elapsed_s += time.perf_counter() - start
    run.exits += round(await read_metric(base_url, _EXITS) - before)
    run.settle(records)


def _missed(config: ServeBenchmark, ratios: Sequence[Ratios]) -> list[str]:
    """What exits should have saved or kept, and did not."""
    certificate = load_policy(config.head).certificate
    alpha = None if certificate is None else certificate.get("alpha")
    missed = []
    for found in (ratios_ for ratios_ in ratios if ratios_.arm == "exits"):
        at = f"concurrency {found.concurrency}"
        if found.tokens.value < config.least_token_ratio:
            missed.append(f"{at}: full thinking takes {found.tokens.value:.2f} times the tokens")
        if found.share < config.least_share:
            missed.append(f"{at}: of the token ratio, {found.share:.2f} arrive as latency")
        if isinstance(alpha, float) and found.lost.interval.low > alpha:
            missed.append(f"{at}: accuracy lost {found.lost.text(3)}, certified at most {alpha}")
    return missed


def _json(
    config: ServeBenchmark, figures: Sequence[ArmFigures], ratios: Sequence[Ratios], missed: Sequence[str]
) -> dict[str, JSON]:
    return {
        "config": config_json(config),
        "arms": [found.to_json() for found in figures],
        "ratios": [found.to_json() for found in ratios],
        "missed": list(missed),
    }

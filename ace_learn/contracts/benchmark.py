"""What a committer costs per chunk, how that grows with the text, and what parsing anew at each chunk would cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ace_learn.contracts.base import Contract
from ace_learn.json_type import JSON

SUBJECTS: dict[str, tuple[dict[str, JSON], str]] = {
    "boxed": ({}, "We have \\frac{1}{2} of {x}, and a box to fill; then \\(y\\) follows.\n"),
    "integer": ({}, "We add 17 and 25, carry the 1, and look at 204.5 once more.\n"),
    "choice": ({"options": ["A", "B", "C", "D"]}, "Option A looks wrong, (B) may be too; what about C or D?\n"),
    "label": ({"labels": ["spam", "ham"]}, "The mail reads like spam in part, and like ham in others.\n"),
    "tag": ({"tag": "final"}, "Put it into <final > or </final>, not into <b>bold</b> text.\n"),
    "json": ({"schema": {"type": "object", "required": ["a"]}}, 'It is {"b": [1, "two", null]} or {a: 1} here.\n'),
    "patch": ({}, "--- a/x.py\n+++ b/x.py\nno hunk follows\n```python\nx = 1\n```\n"),
    "regex": ({"pattern": "[A-Z]{2}-[0-9]+"}, "Tickets look like A-1 or AB 12, this one is not there yet.\n"),
}  # fmt: skip
"""Keys of the spec, and a text that comes close to an answer again and again without giving one."""


@dataclass(frozen=True, kw_only=True)
class ContractBenchmark:
    """Sizes of the measurement."""

    chunk: int = 4
    """Characters per feed; a token holds about so many."""
    small: int = 1_000
    """Characters of the short text."""
    large: int = 1_000_000
    """Characters of the long text."""
    naive: int = 4_000
    """Characters of the text that is also parsed anew at each chunk, which takes time quadratic in it."""
    seconds: float = 0.2
    """Each measurement is repeated for so long; the repetition that took least processor time counts."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if not 1 <= self.chunk <= self.small < self.large or self.naive < self.chunk:
            raise ValueError(
                "need 1 <= chunk <= small < large and naive >= chunk, not "
                f"{self.chunk}, {self.small}, {self.large} and {self.naive}"
            )


class ContractCost(NamedTuple):
    """The cost of one kind."""

    kind: str
    microseconds: float
    """Per feed, on the long text."""
    exponent: float
    """log(cost ratio) / log(size ratio) between the short and the long text; 1 is linear."""
    naive_ratio: float
    """Cost of parsing anew at each chunk over the committer's, on the text of `naive` characters."""


def benchmark_contracts(config: ContractBenchmark) -> list[ContractCost]:
    """Measures every kind, side by side in one process, and prints a line for each."""
    print(f"{'kind':<9}{'us per feed':>12}{'growth':>9}{f'anew at {config.naive}':>14}")
    costs = []
    for kind in SUBJECTS:
        cost = _measure(kind, config)
        costs.append(cost)
        print(f"{kind:<9}{cost.microseconds:>12.2f}{cost.exponent:>9.3f}{cost.naive_ratio:>13.0f}x", flush=True)
    return costs


def _measure(kind: str, config: ContractBenchmark) -> ContractCost:
    keys, text = SUBJECTS[kind]
    contract = Contract.from_spec({"kind": kind, **keys})

    def filled(size: int) -> str:
        return (text * (size // len(text) + 1))[:size]

    def streamed(size: int) -> float:
        whole = filled(size)
        return _fastest(lambda: _stream(contract, whole, config.chunk), config.seconds)

    small, large = streamed(config.small), streamed(config.large)
    whole = filled(config.naive)
    naive = _fastest(lambda: _anew(contract, whole, config.chunk), config.seconds)
    return ContractCost(
        kind=kind,
        microseconds=1e6 * large / math.ceil(config.large / config.chunk),
        exponent=math.log(large / small) / math.log(config.large / config.small),
        naive_ratio=naive / streamed(config.naive),
    )


def _fastest(work: Callable[[], None], seconds: float) -> float:
    best, end = math.inf, time.process_time() + seconds
    while best == math.inf or time.process_time() < end:
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def _stream(contract: Contract, text: str, chunk: int) -> None:
    committer = contract.committer()
    for at in range(0, len(text), chunk):
        committer.feed(text[at : at + chunk])
    assert committer.close() is None, f"the text for {contract.kind} commits"


def _anew(contract: Contract, text: str, chunk: int) -> None:
    for at in range(chunk, len(text) + chunk, chunk):
        contract.project(text[:at])

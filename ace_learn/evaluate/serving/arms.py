"""The three ways of asking, and what came of the requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.contracts import Contract
from ace_learn.engines.answer_reader import ServedOutput
from ace_learn.engines.server import ChatRequest
from ace_learn.labels.records import TraceRecord
from ace_learn.tasks import JsonObject
from ace_learn.tasks.base import user_message

ArmName: TypeAlias = Literal["full", "exits", "oracle"]
"""`full`: no exits; `exits`: learned; `oracle`: vLLM's own thinking budget, at the least thinking that keeps the answer
of the labelled trace (another sample of the same problem)."""
ARMS: tuple[ArmName, ...] = get_args(ArmName)


def body_of(arm: ArmName, record: TraceRecord) -> JsonObject:
    """What a request says besides its chat: in every arm the answer ends where its contract is met."""
    asked: JsonObject = {"ace_contract": record.contract}
    if arm == "exits":
        asked["ace_enabled"] = 1
    body: JsonObject = {"vllm_xargs": asked}
    return body if arm != "oracle" else body | {"thinking_token_budget": record.minimal_tokens}


def request_of(arm: ArmName, record: TraceRecord, max_new_tokens: int) -> ChatRequest:
    """The request for a problem; its seed is the same in every arm."""
    return ChatRequest(
        key=record.problem,
        messages=user_message(record.prompt),
        contract=Contract.from_spec(json.loads(record.contract)),
        max_new_tokens=max_new_tokens,
        body=body_of(arm, record),
    )


@dataclass(kw_only=True)
class ArmRun:
    """All requests of one arm at one concurrency."""

    arm: ArmName
    concurrency: int
    outputs: dict[int, list[ServedOutput]] = field(default_factory=dict)
    """By problem, one of each round."""
    correct: dict[int, list[bool]] = field(default_factory=dict)
    """As `outputs`."""
    elapsed_s: float = 0.0
    """How long the server was busy with them."""
    exits: int = 0
    """By the server's own count."""

    def add(self, output: ServedOutput) -> None:
        """Notes the output of a problem in the next of its rounds."""
        self.outputs.setdefault(output.key, []).append(output)

    def settle(self, records: Sequence[TraceRecord]) -> None:
        """Scores the latest outputs of some problems.

        Raises:
            ValueError: The server failed on one of them.
        """
        for record in records:
            output = self.outputs[record.problem][-1]
            if output.error is not None or output.finish_reason in ("error", "timeout"):
                raise ValueError(f"problem {record.problem} got no answer: {output.error or output.finish_reason}")
            contract = Contract.from_spec(json.loads(record.contract))
            gold = None if record.gold is None else json.loads(record.gold)
            right = gold is not None and contract.equal(output.answer, gold)
            self.correct.setdefault(record.problem, []).append(right)

    @property
    def num_requests(self) -> int:
        """Outputs of all problems and rounds."""
        return sum(map(len, self.outputs.values()))

    def column(self, name: Literal["tokens", "seconds"]) -> Float[ndarray, " n"]:
        """A figure of every problem, the mean of its rounds, in the order of the problems."""
        return self._means(lambda key: [getattr(output, name) for output in self.outputs[key]])

    @property
    def valid(self) -> Float[ndarray, " n"]:
        """In which share of its rounds each problem got an answer."""
        return self._means(lambda key: [output.answer is not None for output in self.outputs[key]])

    @property
    def right(self) -> Float[ndarray, " n"]:
        """In which share of its rounds each problem got the right answer."""
        return self._means(self.correct.__getitem__)

    def _means(self, figures: Callable[[int], Sequence[float]]) -> Float[ndarray, " n"]:
        return np.array([np.mean(figures(key)) for key in sorted(self.outputs)], dtype=np.float64)

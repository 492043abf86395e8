"""The three ways of asking, and what came of the requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Bool, Float
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
    outputs: dict[int, ServedOutput] = field(default_factory=dict)
    """By problem."""
    correct: dict[int, bool] = field(default_factory=dict)
    elapsed_s: float = 0.0
    """How long the server was busy with them."""
    exits: int = 0
    """By the server's own count."""

    def settle(self, records: Sequence[TraceRecord]) -> None:
        """Scores the outputs of some problems.

        Raises:
            ValueError: The server failed on one of them.
        """
        for record in records:
            output = self.outputs[record.problem]
            if output.error is not None or output.finish_reason in ("error", "timeout"):
                raise ValueError(f"problem {record.problem} got no answer: {output.error or output.finish_reason}")
            contract = Contract.from_spec(json.loads(record.contract))
            gold = None if record.gold is None else json.loads(record.gold)
            self.correct[record.problem] = gold is not None and contract.equal(output.answer, gold)

    def column(self, name: Literal["tokens", "seconds"]) -> Float[ndarray, " n"]:
        """A figure of every output, in the order of the problems."""
        return np.array([getattr(self.outputs[key], name) for key in sorted(self.outputs)], dtype=np.float64)

    @property
    def valid(self) -> Bool[ndarray, " n"]:
        """Which outputs hold an answer."""
        return np.array([self.outputs[key].answer is not None for key in sorted(self.outputs)])

    @property
    def right(self) -> Bool[ndarray, " n"]:
        """Which answers are right."""
        return np.array([self.correct[key] for key in sorted(self.outputs)])

"""The audit record of one request: where its thinking ended and why, and where its answer was complete. No vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ace_learn.contracts import JSON
from ace_learn.engines.vllm.answer import RequestFollower
from ace_learn.engines.vllm.events import ExitEvent
from ace_learn.engines.vllm.options import RequestOptions
from ace_learn.signals import named

KEY = "ace_learn"
"""The record's key in a finished output's `kv_transfer_params`."""

AuditReason = Literal["policy", "shadow", "natural", "budget", "length", "none"]
"""Why thinking ended: an exit; by itself, where an exit in shadow mode would have come first; by itself; at the
request's own thinking budget; with the request at its cap. `none`: it never began, or the request ended inside it."""

_LARGEST = 2**63
"""Integers from here on do not travel between vLLM's processes."""


class Audit:
    """Collects what is known of a running request, and makes the record when it ends."""

    def __init__(self, options: RequestOptions, *, budget: int | None) -> None:
        """Starts a request.

        Args:
            options: What is done for it.
            budget: Its own thinking budget in tokens; None without one.
        """
        self.options, self.budget = options, budget
        self._exits: dict[int, ExitEvent] = {}
        self._shadow: tuple[int, ExitEvent] | None = None
        self._failures: list[str] = []
        self._blocked = 0
        self._spent = 0.0

    def see(self, events: Sequence[ExitEvent], *, before: int, sampled: int, blocked: Sequence[int] = ()) -> None:
        """Takes note of the rows that fired in a step; those behind a rejected draft did not happen.

        Args:
            events: In the order of their rows.
            blocked: Rows that fired where the request's grammar forbids the think end.
            before: Output tokens before the step.
            sampled: Tokens that the step sampled for the request.
        """
        self._blocked += sum(row < sampled for row in blocked)
        for event in events:
            if event.row >= sampled:
                continue
            place = before + event.row
            if event.forced:
                self._exits[place] = event
            elif self.options.shadow and self._shadow is None:
                self._shadow = (place, event)

    def spend(self, nats: float) -> None:
        """Takes note of what a lossy acceptance rule has spent in a step: the sum of KL(h||q) over its rows."""
        self._spent += nats

    def fail(self, message: str) -> None:
        """Takes note that the hook gave the request up."""
        self._failures.append(message)

    def record(self, follower: RequestFollower, *, finish_reason: str, hook_off: bool) -> dict[str, JSON]:
        """The record of a request that has ended.

        Args:
            follower: Its tokens.
            finish_reason: `contract`, `stop`, `length`, `context`, or what vLLM says.
            hook_off: Whether the exit hook is off for good.
        """
        contract, commit = self.options.contract, follower.commit
        committed = commit is not None and commit.length <= follower.length
        reason, exit_position, event = self._end_of_thought(follower)
        return {
            "exit_position": exit_position,
            "reason": reason,
            "signals": None if event is None else _finite(named(event.signals)),
            "thresholds": self._thresholds(),
            "paragraphs": follower.paragraphs if event is None else event.paragraphs,
            "tokens_thought": follower.tokens_thought if event is None else event.tokens_thought,
            "think_tokens": follower.tokens_thought,
            "certified": self.options.certified,
            "budget": self.budget,
            "answer": portable(follower.answer),
            "contract_valid": None if contract is None else contract_holds(follower),
            "commit_position": commit.length if commit is not None and committed else None,
            "cut": follower.cut,
            "tokens": follower.length,
            "surplus": follower.surplus,
            "finish_reason": finish_reason,
            "spec": {
                "verify_steps": follower.verify_steps,
                "drafted": follower.drafted,
                "accepted": follower.accepted,
            },
            "kl": self._spent,
            "blocked": self._blocked,
            "hook_failures": list[JSON](self._failures),
            "hook_off": hook_off,
        }

    def _end_of_thought(self, follower: RequestFollower) -> tuple[AuditReason, int | None, ExitEvent | None]:
        """Why thinking ended, how many output tokens came before, and the event that says so."""
        ended = follower.think_end
        if ended is not None and ended in self._exits:
            return "policy", ended, self._exits[ended]
        if self._shadow is not None and self._shadow[0] < follower.length:
            return "shadow", *self._shadow
        if ended is not None:
            at_budget = self.budget is not None and follower.tokens_thought >= self.budget
            return "budget" if at_budget else "natural", ended, None
        capped = follower.finish is not None and follower.finish.reason in ("length", "context")
        return "length" if capped and follower.thinking else "none", None, None

    def _thresholds(self) -> dict[str, JSON]:
        policy = self.options.policy
        if policy.score is not None:
            return {"score": policy.score.threshold}
        return dict(policy.thresholds)


def _finite(signals: Mapping[str, float]) -> dict[str, JSON]:
    return {name: value for name, value in signals.items() if math.isfinite(value)}


def contract_holds(follower: RequestFollower) -> bool:
    """Whether the request has an answer that its contract allows."""
    contract = follower.rules.contract
    return contract is not None and follower.answer is not None and contract.valid(follower.answer)


def portable(value: JSON) -> JSON:
    """A value that every process and every client can read: integers of more than 64 bits become their digits."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return str(value)
    return value

"""The finish window: which of the tokens that a step accepted are kept, and why the request ends.

A step accepts N >= 1 tokens. Every finish condition is looked for in the whole window, in token order; the earliest
wins, and at the same position the specific one beats the caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "contract", "length", "context"]


class Finish(NamedTuple):
    """Where and why a request ends."""

    length: int
    """Output tokens kept, counted from the first generated token; the token that ends the request is kept."""
    reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class FinishLimits:
    """Conditions that depend on token ids and counts alone."""

    stop_ids: frozenset[int]
    max_new_tokens: int
    context_room: int
    """Output tokens that fit into the model's context behind the prompt."""
    min_tokens: int = 0
    """Stop tokens among the first `min_tokens` tokens do not end the request."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        if self.max_new_tokens < 1 or self.context_room < 1 or self.min_tokens < 0:
            raise ValueError(
                "need max_new_tokens >= 1, room for at least one token and min_tokens >= 0, not "
                f"{self.max_new_tokens}, {self.context_room} and {self.min_tokens}; "
                "shorten the prompt or raise the limit"
            )


def finish_window(
    accepted: Sequence[int],
    *,
    before: int,
    limits: FinishLimits,
    committed: int | None = None,
    stop_string: int | None = None,
    answer_cap: int | None = None,
) -> Finish | None:
    """Looks for every finish condition in a window of accepted tokens.

    Args:
        accepted: The window's token ids, in order.
        before: Output tokens before the window.
        limits: Stop tokens and caps.
        committed: Output length at which the contract committed, if it did in or before this window (a commit may be
            decided later than it ends, so this may be at most `before`).
        stop_string: Output length at which a stop string completed, if one did.
        answer_cap: Output length at which the answer's own cap is reached.

    Returns:
        The earliest finish, or None while the request goes on.
    """
    found = [
        Finish(before + i + 1, "stop")
        for i, token in enumerate(accepted)
        if token in limits.stop_ids and before + i + 1 > limits.min_tokens
    ][:1]
    if stop_string is not None and stop_string > limits.min_tokens:
        found.append(Finish(stop_string, "stop"))
    if committed is not None:
        found.append(Finish(committed, "contract"))
    after = before + len(accepted)
    caps: list[Finish] = [Finish(limits.max_new_tokens, "length"), Finish(limits.context_room, "context")]
    if answer_cap is not None:
        caps.append(Finish(answer_cap, "length"))
    found.extend(cap for cap in caps if cap.length <= after)
    priority = ("contract", "stop", "length", "context")
    return min(found, key=lambda finish: (finish.length, priority.index(finish.reason)), default=None)

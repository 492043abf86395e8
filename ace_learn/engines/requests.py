"""What goes into an engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ace_learn.contracts import JSON, Contract
from ace_learn.speculation.window import FinishReason

EosInThink = Literal["force_think_end", "stop"]
"""What a stop token inside the thinking does: it becomes the think end, or it ends the request without an answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue."""

    key: int
    """Names the request's noise; the same key, seed and position give the same draw in every run."""
    prompt_ids: tuple[int, ...]
    contract: Contract | None = None
    """Ends the request where its answer is complete."""
    thinking: bool = True
    """Off: the prompt has thinking disabled, and no exit is forced whatever the model opens."""
    max_new_tokens: int = 4096
    max_answer_tokens: int | None = None
    """Cap on the tokens behind the think end."""
    min_tokens: int = 0
    """Stop tokens among the first `min_tokens` tokens do not end the request."""
    stop: tuple[str, ...] = ()
    """Stop strings, looked for outside the thinking; the text before the earliest is kept."""
    eos_in_think: EosInThink = "force_think_end"
    """What a stop token inside the thinking does."""

    def __post_init__(self) -> None:
        """Checks the answer cap and the policy; the other limits are checked with the model's context."""
        if self.eos_in_think not in get_args(EosInThink):
            raise ValueError(f"unknown eos_in_think {self.eos_in_think!r}; known: {', '.join(get_args(EosInThink))}")
        if self.max_answer_tokens is not None and self.max_answer_tokens < 1:
            raise ValueError(f"max_answer_tokens must be >= 1, not {self.max_answer_tokens}")


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """Audit of a forced think end."""

    output_index: int
    """Output tokens before the think end."""
    tokens_thought: int
    paragraphs: int
    signals: dict[str, float]
    """Smoothed signals at the boundary."""
    reason: str = "policy"


@dataclass(kw_only=True)
class SpeculationStats:
    """Speculation of one request. Only kept tokens count as accepted; the prefill is the first verify step."""

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    """Accepted drafts of a step -> steps; what a commit of a later step removes is still in it."""
    kl_spent: float = 0.0
    """What a lossy acceptance rule has spent on its verified rows: KL(h||q) given the drafts, nats."""

    def record(self, drafted: int, accepted: int, kl: float = 0.0) -> None:
        """Counts one verify step; `accepted` in total is settled when the request ends."""
        self.verify_steps += 1
        self.kl_spent += kl
        self.drafted += drafted
        self.histogram[accepted] = self.histogram.get(accepted, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished request."""

    key: int
    token_ids: tuple[int, ...]
    """Output tokens; the token that ends the request is kept, what stands after it is dropped."""
    logprobs: tuple[float, ...]
    """Raw log-probability of each output token, nats. A forced token keeps the model's own."""
    finish_reason: FinishReason
    think_start: int | None
    """Index of the first think token; None if thinking never began."""
    think_end: int | None
    """Index of the first token of the think end; None if thinking never ended."""
    answer: JSON
    """The contract's answer; None without one."""
    answer_text: str
    """Text outside the thinking, cut at the commit or before the stop string."""
    exit: ExitRecord | None
    """None where thinking ended by itself."""
    stats: SpeculationStats
    seconds: float
    """From the start of the batch to the request's last token; with a valid answer, the time to it."""

    @property
    def think_tokens(self) -> int:
        """Tokens of the think span."""
        if self.think_start is None:
            return 0
        return (len(self.token_ids) if self.think_end is None else self.think_end) - self.think_start

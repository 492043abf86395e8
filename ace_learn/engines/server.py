"""A server to ask, and what to ask it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from ace_learn.contracts import Contract
from ace_learn.tasks.base import Message
from ace_learn.tasks.json_object import JsonObject

Count = Literal["usage", "continuous_usage", "token_ids", "logprobs"]
"""How a server is asked to count its tokens."""
_SET_HERE = (
    "model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "seed",
    "logprobs", "return_token_ids", "continue_final_message", "add_generation_prompt",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """An OpenAI-compatible server."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Where the server is; most end in /v1."""
    model: str | None = None
    """Which of its models; None: the only one that it has."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, for servers that want one."""
    concurrency: int = 8
    """Requests under way at a time."""
    timeout_s: float = 600.0
    """Longest time of a request, retries included; then it ends with what has come."""
    stall_s: float = 120.0
    """Longest wait for the next piece of an answer; then the call counts as broken, and is tried again."""
    retries: int = 3
    """How often a call is tried again: connection errors, broken streams, and the states 408, 409, 425, 429 and 5xx."""
    backoff_s: float = 0.5
    """Wait before the first retry, doubled for each further one, unless the server says how long (Retry-After)."""
    chunk: int = 0
    """Tokens per call, for a server that cannot stream; 0: stream. The text so far is sent along with each call."""
    count: Count = "usage"
    """How tokens are counted: `usage` (which most servers send at the end only, so that a closed stream is counted by
    its chunks), `continuous_usage`, `token_ids` (both vLLM), or `logprobs`. With chunks, `token_ids` also makes the
    next call go on behind the very tokens of the last."""
    temperature: float | None = None
    """None: the server's own."""
    top_p: float | None = None
    """None: the server's own."""
    seed: int = 0
    """A request's seed is this plus the number of its problem; also, which problems of the task."""
    body: JsonObject = field(default_factory=dict)
    """Further fields of each request, such as {skip_special_tokens: false} where a server hides think markers."""

    def __post_init__(self) -> None:
        """Checks ranges, and refuses what is set elsewhere."""
        if urlsplit(self.base_url).scheme not in ("http", "https") or not urlsplit(self.base_url).netloc:
            raise ValueError(f"base_url must be like http://127.0.0.1:8000/v1, not {self.base_url!r}")
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, not {self.concurrency}")
        for name in ("timeout_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, not {getattr(self, name)}")
        for name in ("retries", "backoff_s", "chunk"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, not {getattr(self, name)}")
        if twice := [name for name in self.body if name in _SET_HERE]:
            raise ValueError(f"body must not hold {', '.join(twice)}, which other fields of the recipe set")
        if self.chunk and "max_completion_tokens" in self.body:
            raise ValueError("max_completion_tokens would be ignored with chunk; leave it out of body")
        if self.chunk and self.count == "continuous_usage":
            raise ValueError("count: continuous_usage goes with streams; with chunk every call counts its own usage")


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One chat to continue."""

    key: int
    """Number of the request; it makes its seed."""
    messages: tuple[Message, ...]
    """The chat; the last turn is the user's."""
    contract: Contract
    """Ends the request where its answer is complete."""
    max_new_tokens: int = 4096
    """Cap on the output, thinking included."""
    starts_in_think: bool = False
    """The server's template opens the think block, and the server sends the thinking in the answer's channel."""
    body: JsonObject = field(default_factory=dict)
    """Further fields of this request; they beat those of the server's config."""

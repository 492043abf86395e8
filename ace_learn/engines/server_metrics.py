"""What a server says of itself: how many requests run, and how many tokens it has generated."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

_RUNNING = "vllm:num_requests_running"
_GENERATED = "vllm:generation_tokens_total"
_POLL_S = 0.02
_QUIET_POLLS = 3


class ServerState(NamedTuple):
    """Figures of vLLM's /metrics, summed over engines and models."""

    running: float
    generated: float
    """Output tokens since the server's start."""


def metrics_url(base_url: str) -> str:
    """Where vLLM keeps its metrics: beside /v1, not below it."""
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def parse_metrics(text: str) -> ServerState | None:
    """Reads the Prometheus text format; None if the two figures are not there."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (_RUNNING, _GENERATED):
            rest = line.rpartition("}")[2] if "{" in line else line.removeprefix(name)
            sums[name] = sums.get(name, 0.0) + float(rest.split()[0])
    return ServerState(sums[_RUNNING], sums[_GENERATED]) if len(sums) == 2 else None


async def read_metric(base_url: str, name: str) -> float:
    """One figure of the server, by its full name with labels; 0 where there is none (yet)."""
    text = await asyncio.to_thread(_read_text, metrics_url(base_url))
    values = [line.rpartition(" ")[2] for line in (text or "").splitlines() if line.startswith(f"{name} ")]
    return sum(map(float, values))


async def read_state(base_url: str) -> ServerState | None:
    """The server's figures; None where it has no metrics of vLLM's kind, or none can be had."""
    return await asyncio.to_thread(_read, metrics_url(base_url))


async def read_quiet_state(base_url: str, *, within_s: float = 10.0) -> ServerState | None:
    """The figures once nothing runs and the tokens have stopped growing.

    None where there are no figures, or the server is busy for longer than `within_s` seconds: another client uses it,
    or it has not stopped.
    """
    last: ServerState | None = None
    quiet = 0
    for _ in range(max(1, round(within_s / _POLL_S))):
        state = await read_state(base_url)
        if state is None:
            return None
        quiet = quiet + 1 if state == last and state.running == 0 else 0
        if quiet == _QUIET_POLLS:
            return state
        last = state
        await asyncio.sleep(_POLL_S)
    return None


def _read(url: str) -> ServerState | None:
    text = _read_text(url)
    return None if text is None else parse_metrics(text)


def _read_text(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            body: bytes = answer.read()
    except (OSError, HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        return None
    return body.decode(errors="replace")

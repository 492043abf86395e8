"""vLLM's own arguments in a recipe, and how they are spelled on its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ace_learn.json_type import JSON

ARGUMENTS = frozenset({
    "allowed-origins", "api-server-count", "async-scheduling", "attention-backend", "block-size",
    "chat-template", "chat-template-content-format", "cpu-offload-gb", "cudagraph-capture-sizes", "data-parallel-size",
    "default-chat-template-kwargs", "device-ids", "device-memory-utilization", "disable-access-log-for-endpoints",
    "disable-cascade-attn", "disable-custom-all-reduce", "disable-fastapi-docs", "disable-log-stats",
    "disable-uvicorn-access-log", "enable-auto-tool-choice", "enable-chunked-prefill", "enable-expert-parallel",
    "enable-force-include-usage", "enable-log-requests", "enable-prefix-caching", "enable-prompt-tokens-details",
    "enable-request-id-headers", "enable-server-load-tracking", "enforce-eager", "exclude-tools-when-tool-choice-none",
    "generation-config", "gpu-memory-utilization", "kv-cache-dtype", "kv-cache-memory-bytes", "language-model-only",
    "limit-mm-per-prompt", "log-error-stack", "log-level", "logprobs-mode", "long-prefill-token-threshold",
    "max-cudagraph-capture-size", "max-log-len", "max-logprobs", "max-model-len", "max-num-batched-tokens",
    "max-num-queued-reqs", "max-num-queued-tokens", "max-num-seqs", "max-parallel-loading-workers", "moe-backend",
    "num-gpu-blocks-override", "numa-bind", "optimization-level", "override-generation-config",
    "per-request-spec-decode-metrics", "performance-mode", "pipeline-parallel-size", "quantization",
    "reasoning-config", "reasoning-parser", "response-role", "return-tokens-as-token-ids", "root-path",
    "safetensors-load-strategy", "scheduling-policy", "seed", "served-model-name", "shutdown-timeout",
    "sse-keep-alive-interval", "stream-interval", "tensor-parallel-size", "tool-call-parser", "uvicorn-log-level",
})  # fmt: skip
"""What a recipe may hand on: sizes, switches and names of vLLM's own parts. Nothing that loads code or opens a port,
since a recipe may come with a download."""

_ELSEWHERE = {
    "model": "target.model",
    "dtype": "target.dtype",
    "revision": "target.revision",
    "speculative-config": "drafter",
    "spec-method": "drafter.kind",
    "spec-model": "drafter.model",
    "spec-tokens": "drafter.draft_tokens",
    "additional-config": "settings",
    "host": "the environment variable ACE_LEARN_HOST",
    "port": "the environment variable ACE_LEARN_PORT",
    "api-key": "the environment variable VLLM_API_KEY",
}
"""What is said in another place."""


def vllm_flags(arguments: Mapping[str, JSON]) -> list[str]:
    """The command-line flags of a recipe's `vllm` mapping; names may have underscores or dashes.

    Raises:
        ValueError: An argument that is said elsewhere, or that a recipe may not hand on; or null.
    """
    flags: list[str] = []
    for given, value in arguments.items():
        name = given.replace("_", "-")
        if name in _ELSEWHERE:
            raise ValueError(f"vllm.{given}: this is said by {_ELSEWHERE[name]}; leave it out here")
        if name not in ARGUMENTS:
            raise ValueError(
                f"vllm.{given} is none of the arguments that a recipe may hand on ({', '.join(sorted(ARGUMENTS))}). "
                "Add it by hand to the command that --dry_run true prints"
            )
        flags += _spelled(name, value)
    return flags


def _spelled(name: str, value: JSON) -> list[str]:
    match value:
        case None:
            raise ValueError(f"vllm.{name} is null; leave it out")
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case dict():
            return [f"--{name}", json.dumps(value)]
        case list():
            return [f"--{name}", *map(_text, value)]
        case _:
            text = _text(value)
            return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)

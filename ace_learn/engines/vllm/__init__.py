"""The vLLM plugin: learned exits, contract commits and audits in a stock server. Imports without vLLM.

`llm(model, head=...)` is a plain `vllm.LLM` with exits; see `ace_learn.engines.vllm.offline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ace_learn.engines.vllm.offline import llm

__all__ = ["llm"]


def __getattr__(name: str) -> object:
    """Imports `llm` when it is asked for: importing this package must stay cheap."""
    if name == "llm":
        from ace_learn.engines.vllm.offline import llm

        return llm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

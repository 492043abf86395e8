"""Engines that decode with the exit rule, contracts and speculation."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ace_learn.engines.hf import HFEngine
    from ace_learn.engines.loading import load_engine
    from ace_learn.engines.requests import Output, Request
    from ace_learn.engines.sampling import Sampling

__all__ = ["HFEngine", "Output", "Request", "Sampling", "load_engine"]

_MODULES = {
    "HFEngine": "ace_learn.engines.hf",
    "load_engine": "ace_learn.engines.loading",
    "Output": "ace_learn.engines.requests",
    "Request": "ace_learn.engines.requests",
    "Sampling": "ace_learn.engines.sampling",
}


def __getattr__(name: str) -> object:
    """Imports an engine when it is asked for: every process of vLLM imports this package, to find the plugin in it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(_MODULES[name]), name)
    return found

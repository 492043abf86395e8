"""vLLM's offline engine with learned exits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ace_learn.engines.vllm.plugin import register
from ace_learn.engines.vllm.settings import KEY, Settings
from ace_learn.models.target import EMBEDDED
from ace_learn.reasoner import weights_path

if TYPE_CHECKING:
    from vllm import LLM


def llm(model: str, *, head: str | Path | None = None, settings: Settings | None = None, **kwargs: object) -> LLM:
    """A plain `vllm.LLM` whose requests may end their thinking early (`extra_args={"ace_enabled": True}`).

    Args:
        model: Folder or hub id; `ace_learn/reasoner` is the embedded reasoner.
        head: Head folder with its policy; None: contracts only.
        settings: What else the plugin does; its `head` must be the one above, or None.
        kwargs: Of `vllm.LLM`.

    Raises:
        ValueError: The head belongs to another model, or the engine cannot run exits.
    """
    from vllm import LLM

    register()
    settings = settings or Settings()
    if head is not None:
        if settings.head not in (None, str(head)):
            raise ValueError(f"two heads are named, {head} and, in the settings, {settings.head}; leave one out")
        settings = Settings.from_json(settings.to_json() | {"head": str(head)})
    additional = kwargs.pop("additional_config", None) or {}
    if not isinstance(additional, dict) or KEY in additional:
        raise ValueError(f"additional_config[{KEY!r}] is written from head and settings; leave it out")
    path = str(weights_path()) if model == EMBEDDED else model
    return LLM(path, additional_config={**additional, KEY: settings.to_json()}, **kwargs)

"""Where vLLM finds this package: the entry point `vllm.general_plugins`, and what it changes in a configuration.

`register` runs in every process of vLLM and wraps one method, `EngineArgs.create_engine_config`. A configuration whose
`additional_config` holds no object `ace_learn` passes through untouched. One that does is checked before any weights
are loaded, and gets our worker, our scheduler and, for Model Runner V2, our logits processor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_MARK = "_ace_learn_wrapped"


def register() -> None:
    """Entry point: lets `additional_config["ace_learn"]` configure an engine; cheap, and may be called again."""
    from vllm.engine.arg_utils import EngineArgs

    if not getattr(EngineArgs.create_engine_config, _MARK, False):
        EngineArgs.create_engine_config = _configuring(EngineArgs.create_engine_config)


def _configuring(create: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    @wraps(create)
    def create_engine_config(self: EngineArgs, *args: object, **kwargs: object) -> VllmConfig:
        config = create(self, *args, **kwargs)
        configure(config)
        return config

    setattr(create_engine_config, _MARK, True)
    return create_engine_config


def configure(vllm_config: VllmConfig) -> None:
    """Checks a configuration and puts our classes into it; does nothing where it has no object `ace_learn`.

    Raises:
        ValueError: The settings are malformed, the head belongs to another target, or the server is to do what would
            make exits wrong; says which, and the remedy.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or "ace_learn" not in additional:
        return
    from ace_learn.engines.vllm.configuration import apply_settings

    apply_settings(vllm_config)

"""In-process engines for tests and benches: started, watched, and shut down so that the next one can follow."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ace_learn.json_type import JSON
from ace_learn.testing.vllm.mimo import register
from ace_learn.testing.vllm.shims import keep_async_scheduling, let_engines_follow, prepare_process

if TYPE_CHECKING:
    from vllm import LLM

MAX_SEQS = 8


@contextmanager
def running_engine(
    model: Path | str,
    *,
    settings: Mapping[str, JSON] | None = None,
    speculation: Mapping[str, JSON] | None = None,
    async_scheduling: bool = False,
    **options: object,
) -> Iterator[LLM]:
    """A `vllm.LLM` in this process (V1, or V2 after `use_interpreted_v2`), shut down at the end of the block.

    Args:
        model: Folder of the target.
        settings: The plugin's settings (`additional_config["ace_learn"]`); None: the plugin stays inert.
        speculation: vLLM's `speculative_config`.
        async_scheduling: Keep asynchronous scheduling on a CPU.
        options: Further arguments of `vllm.LLM`; they beat the ones for tiny models that are given here.
    """
    prepare_process()
    register()
    if async_scheduling:
        keep_async_scheduling()
    let_engines_follow()
    from vllm import LLM

    arguments: dict[str, object] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": MAX_SEQS,
        "disable_log_stats": True,
        "seed": 0,
        "async_scheduling": async_scheduling,
        "enable_prefix_caching": False,
        "additional_config": {} if settings is None else {"ace_learn": dict(settings)},
        "speculative_config": None if speculation is None else dict(speculation),
    }
    llm = LLM(str(model), **(arguments | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()

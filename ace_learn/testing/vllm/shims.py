"""What makes a machine without a GPU run the code that GPUs run. Call these before vLLM is imported."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def prepare_process() -> None:
    """Sets what in-process engines on a CPU want; a variable that is set already is left alone.

    One thread: the models are tiny, and idle OpenMP threads spin, which is a hundred times slower. One process: tests
    and benches reach into the scheduler and the runner.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def use_interpreted_v2() -> None:
    """Runs Model Runner V2 on a CPU: its Triton kernels go through Triton's interpreter.

    vLLM ships the CPU side of that runner, and refuses it only because the CPU build has no Triton back end. The
    back end given here says that it is there; the interpreter never asks it for anything else. N-gram drafting and
    sampled drafts (`draft_sample_method: probabilistic`) do not run this way: the interpreter rejects a mask in their
    kernels.

    Raises:
        RuntimeError: Triton or vLLM is imported already (by a model class of transformers, say), and has made up its
            mind by then.
        ImportError: There is no Triton (PyPI's `triton` is enough).
    """
    early = [name for name in ("triton", "vllm") if name in sys.modules]
    if early:
        raise RuntimeError(
            f"{' and '.join(early)} is imported already; call use_interpreted_v2 first, in a process for V2 alone"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def keep_async_scheduling() -> None:
    """Lets the CPU platform keep asynchronous scheduling, which it switches off; idempotent.

    It is the default on GPUs, and there the scheduler knows no token of the step before. The CPU runners do support it.
    Imports vLLM.
    """
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "ace_learn_stock_check"):
        return
    stock = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        wanted = scheduler.async_scheduling
        stock(cls, vllm_config)
        scheduler.async_scheduling = wanted

    CpuPlatform.ace_learn_stock_check = stock
    CpuPlatform.check_and_update_config = classmethod(check)


def let_engines_follow() -> None:
    """Lets a further engine start in a process in which n-grams were drafted; idempotent. Imports vLLM.

    On a CPU each engine scans all loaded modules for the kernels that it replaces, and takes the `__dict__` of whatever
    it finds for a dictionary. The one of llvmlite's functions, which Numba loads, is none.
    """
    from vllm.triton_utils import dispatcher

    def attributes(value: object) -> dict[str, object]:
        found: object = vars(value)
        return found if isinstance(found, dict) else {}

    dispatcher.vars = attributes

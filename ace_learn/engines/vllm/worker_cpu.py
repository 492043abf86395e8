"""Our worker on CPUs."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from ace_learn.engines.vllm.cpu_fix import install
from ace_learn.engines.vllm.worker import AceWorker


class AceCPUWorker(AceWorker, CPUWorker):
    """vLLM's CPU worker with exits."""

    def init_device(self) -> None:
        """Repairs a kernel of the V1 runner's rejection sampler, then sets up the device as vLLM does."""
        if not self.use_v2_model_runner:
            install()
        super().init_device()

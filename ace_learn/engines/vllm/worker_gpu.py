"""Our worker on GPUs."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from ace_learn.engines.vllm.worker import AceWorker


class AceGPUWorker(AceWorker, Worker):
    """vLLM's GPU worker with exits."""

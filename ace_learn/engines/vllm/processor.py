"""Our logits processor, on the documented interface of Model Runner V2. The API process loads it too, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from ace_learn.engines.vllm.options import read_options
from ace_learn.engines.vllm.settings import settings_of

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from ace_learn.engines.vllm.runner_v2 import V2Exits


class AceLogitsProcessor(LogitsProcessor):
    """Forces the rows that the exit rule has decided on."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        """Is attached to the runner's exits once the model is loaded."""
        settings = settings_of(vllm_config.additional_config)
        assert settings is not None, "the plugin adds this processor where the engine is configured"
        self.settings, self.policy = settings, settings.policy()
        self.exits: V2Exits | None = None

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether the request's rows may be changed."""
        return read_options(sampling_params.extra_args, self.settings, self.policy, request_id="").exits

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Forces tokens in place: after grammar, penalties and bad words, before temperature and truncation."""
        return logits if self.exits is None else self.exits.apply(logits, ctx)

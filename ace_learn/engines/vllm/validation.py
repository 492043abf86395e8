"""In the process that admits requests: refuses wrong `ace_` keys before a request runs, and switches shadow mode.

Two methods of vLLM are wrapped: `InputProcessor.process_inputs`, which every request of every engine passes, offline
ones included; and `AsyncLLM.generate`, whose call comes before a streamed response has sent its status. A ValueError
there is what vLLM's server answers with status 400.

Whether a request is shadowed is decided once, here, and travels with its keys: so the scheduler and all workers agree,
however many there are, and a request that has begun stays what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING

from ace_learn.engines.vllm.options import PREFIX, SHADOW, RequestOptions, read_options
from ace_learn.engines.vllm.settings import settings_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

_MARK = "_ace_learn_wrapped"
_ADMISSION = "_ace_learn_admission"


class Admission:
    """What an engine's requests are checked against.

    Attributes:
        settings: Of the engine; None where it is not configured for this package.
        policy: Of its head; None without one.
        shadow: Whether requests with exits are shadowed from now on; only read with `runtime_switch`.
    """

    def __init__(self, additional_config: object) -> None:
        """Reads the settings and the policy.

        Raises:
            ValueError: The settings are malformed, or the head folder holds no policy.
        """
        self.settings = settings_of(additional_config)
        self.policy = None if self.settings is None else self.settings.policy()
        self.shadow = self.settings is not None and self.settings.shadow

    def check(self, extra_args: Mapping[str, object] | None) -> RequestOptions | None:
        """Refuses wrong options; None where the engine is not configured.

        Raises:
            ValueError: Says which key, and what to send.
        """
        if self.settings is None:
            return None
        return read_options(extra_args, self.settings, self.policy, request_id="")

    def stamped(self, extra_args: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """The keys of an admitted request, with `ace_shadow` where the switch says so.

        Raises:
            ValueError: Says which key is wrong, and what to send.
        """
        options = self.check(extra_args)
        if options is None or self.settings is None:
            return extra_args
        if options.exits and self.settings.runtime_switch and self.shadow:
            return {**(extra_args or {}), SHADOW: True}
        return extra_args


def install_validation() -> None:
    """Wraps both methods; the same however often it is called. Engines that are not configured are left alone."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if not hasattr(InputProcessor, _MARK):
        InputProcessor.process_inputs = _admitting(InputProcessor.process_inputs)
        AsyncLLM.generate = _checking_early(AsyncLLM.generate)
        setattr(InputProcessor, _MARK, True)


def admission_of(processor: InputProcessor) -> Admission:
    """The admission of an engine's input processor, made at its first request.

    Raises:
        ValueError: The settings are malformed, or the head folder holds no policy.
    """
    known = getattr(processor, _ADMISSION, None)
    if isinstance(known, Admission):
        return known
    made = Admission(processor.vllm_config.additional_config)
    setattr(processor, _ADMISSION, made)
    return made


def _admitting(process: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
    @wraps(process)
    def process_inputs(self: InputProcessor, *args: object, **kwargs: object) -> EngineCoreRequest:
        request = process(self, *args, **kwargs)
        params = request.sampling_params  # the request's own copy
        if params is not None:
            params.extra_args = admission_of(self).stamped(params.extra_args)
        return request

    return process_inputs


def _checking_early(generate: Callable[..., object]) -> Callable[..., object]:
    @wraps(generate)
    def checked(
        self: AsyncLLM, prompt: object, sampling_params: SamplingParams, *args: object, **kwargs: object
    ) -> object:
        extra_args = sampling_params.extra_args
        if admission_of(self.input_processor).check(extra_args) is not None and inspect.isasyncgen(prompt):
            _refuse_keys(extra_args)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    return checked


def _refuse_keys(extra_args: Mapping[str, object] | None) -> None:
    if any(key.startswith(PREFIX) for key in extra_args or {}):
        raise ValueError(f"a session with streaming input knows no {PREFIX} keys; leave them out")

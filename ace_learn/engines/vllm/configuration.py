"""What an engine configured for this package is checked for, and which of our classes it gets.

Fields of vLLM's configuration that are set: `parallel_config.worker_cls`, `scheduler_config.scheduler_cls`,
`model_config.logits_processors`. All others are only read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ace_learn.engines.vllm.measure import Reads
from ace_learn.engines.vllm.served import ServedHead, check_drafter, load_served_head
from ace_learn.engines.vllm.settings import Settings, settings_of
from ace_learn.signals import sources_of

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from ace_learn.speculation.drafters import DraftStates

_OURS = "ace_learn.engines.vllm"
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_OURS}.worker_cpu.AceCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{_OURS}.worker_gpu.AceGPUWorker",
}
"""vLLM's worker classes, and what stands in for each."""
SCHEDULER, ASYNC_SCHEDULER = f"{_OURS}.scheduler.AceScheduler", f"{_OURS}.scheduler.AceAsyncScheduler"
PROCESSOR = f"{_OURS}.processor:AceLogitsProcessor"

_CAPPING = ("final_logit_softcapping", "logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
"""Fields of a model's config.json that make its logits no linear function of the hidden states."""


def apply_settings(config: VllmConfig) -> None:
    """Checks an engine's configuration, puts our classes into it, and checks and observes requests in this process.

    Raises:
        ValueError: See `ace_learn.engines.vllm.plugin.configure`.
    """
    from ace_learn.engines.vllm.observer import install_observer
    from ace_learn.engines.vllm.validation import install_validation

    settings = settings_of(config.additional_config)
    assert settings is not None, "only called where the engine is configured for this package"
    if config.model_config.runner_type != "generate":
        raise ValueError(
            f"exits and contracts are for text generation, not for the runner {config.model_config.runner_type!r}"
        )
    if settings.head is not None:
        _check_engine(config)
        served = load_served_head(settings, config.model_config)
        _check_sources(served, config.speculative_config)
        check_drafter(served.head, config.speculative_config)
        if served.head.spec.draft is not None:
            _check_drafted(config, served.head.spec.draft)
    if settings.acceptance.rule != "standard":
        _check_cactus(config, settings)
    _set_scheduler(config)
    if settings.head is not None or settings.acceptance.rule != "standard":
        _set_worker(config)
    install_validation()
    install_observer(settings)


def _check_engine(config: VllmConfig) -> None:
    """Refuses what would make exits wrong, or was never tried."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size}: exits are decided where the logits are, which "
            "most pipeline ranks lack; use tensor parallelism, or serve without a head"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ValueError(
            "prefill context parallelism splits the rows that exits read; set it to 1, or serve without a head"
        )
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise ValueError(
            "batch-sharded sampling gives each rank the rows of other requests than its hidden states; leave out "
            "--enable-batch-sharded-sampling, or serve without a head"
        )
    if config.lora_config is not None:
        raise ValueError(
            "a head belongs to one set of weights, and LoRA adapters change them; serve without --enable-lora, "
            "or without a head"
        )
    capped = [name for name in _CAPPING if getattr(model.hf_text_config, name, None) not in (None, 1, 1.0)]
    if capped:
        raise ValueError(
            f"{model.model} caps or scales its logits ({capped[0]} {getattr(model.hf_text_config, capped[0])}); exits "
            "read the probabilities of tokens from a linear output layer, so serve it without a head"
        )


def _check_sources(served: ServedHead, speculation: SpeculativeConfig | None) -> None:
    """Refuses a head or a policy that reads what no runner can give, or not this one."""
    spec = served.head.spec
    read = {*spec.sources, *(name for names in sources_of(served.policy.signals).values() for name in names)}
    if "candidates" in read:
        raise ValueError(
            "the head or its policy reads the answers that the thinking states (candidates), which vLLM's runners do "
            "not decode; train a head on other sources"
        )
    if "acceptance" in read:
        raise ValueError(
            "the policy reads the signal acceptance, which hangs on coefficients that move with traffic, and the vLLM "
            "plugin keeps none; calibrate a policy without acceptance, or decode with `python -m ace_learn.run` and a "
            "drafter of kind eagle3 or mtp"
        )
    if Reads.of(served.policy, spec).aux:
        tapped = tapped_layers(speculation)
        if tapped is None or not set(spec.aux_layers) <= set(tapped):
            taps = "no drafter taps any layers" if tapped is None else f"the drafter taps {list(tapped)}"
            raise ValueError(
                f"the head reads the hidden states of layers {list(spec.aux_layers)} (target_aux), but {taps}; name an "
                "EAGLE-3 drafter that taps these layers with --speculative-config, or train a head on target_last and "
                "scalars"
            )


def _check_drafted(config: VllmConfig, states: DraftStates) -> None:
    """Refuses what would keep the drafter's states of a prompt's last tokens from being there."""
    speculation, cache = config.speculative_config, config.cache_config
    assert speculation is not None, "checked before"
    if config.kv_transfer_config is not None:
        raise ValueError(
            "the head reads the drafter's hidden states (draft), and a KV connector brings a prompt without them; "
            "serve without --kv-transfer-config, or train a head on other sources"
        )
    # Of a prompt that is found in the cache, its last token and one block are run again, the latter for the drafter.
    again = 1 + cache.block_size if speculation.use_eagle_block_drop() else 1
    if cache.enable_prefix_caching and states.delay > again:
        raise ValueError(
            f"the head reads the drafter's states {states.delay} positions late, and of a cached prompt only the last "
            f"{again} tokens are run again; use --no-enable-prefix-caching, or train a head on other sources"
        )


def _check_cactus(config: VllmConfig, settings: Settings) -> None:
    """Refuses Cactus where its promise does not hold, or where it would never act."""
    rule, speculation, model = settings.acceptance.rule, config.speculative_config, config.model_config
    reasons = {
        "without speculation no draft is ever verified; add --speculative-config": speculation is None,
        "the V1 runner verifies drafts out of reach of plugins; use Model Runner V2": not config.use_v2_model_runner,
        "its budget is per drafted token, and a block is verified as a whole; leave out rejection_sample_method": (
            speculation is not None and speculation.rejection_sample_method != "standard"
        ),
        "adaptive verification decides on the device which drafts are verified, and what they spend could not be told "
        "by request; leave out enable_adaptive_verification": (
            speculation is not None and bool(speculation.enable_adaptive_verification)
        ),
        "processed log-probabilities would be those of its law h; use --logprobs-mode raw_logprobs": (
            model.logprobs_mode.startswith("processed")
        ),
        "a returned sampling mask would be that of its law h; leave out --return-sampling-mask": bool(
            getattr(model, "return_sampling_mask", False)
        ),
        "a watermark is read from the law that was sampled from; leave out the watermark": (
            getattr(config, "watermark_config", None) is not None
        ),
        "only_in_think needs to know who thinks, which it is told by the exit rule; name a head": (
            settings.acceptance.only_in_think and settings.head is None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"acceptance.rule {rule!r} cannot be right here: {reason}, or keep the rule 'standard'")


def tapped_layers(speculation: SpeculativeConfig | None) -> tuple[int, ...] | None:
    """The target layers that an EAGLE-3 drafter reads; None where no drafter reads any."""
    if speculation is None or speculation.method != "eagle3":
        return None
    draft = speculation.draft_model_config.hf_config
    named = getattr(draft, "eagle_aux_hidden_state_layer_ids", None)
    if not named:
        eagle = getattr(draft, "eagle_config", None) or {}
        named = eagle.get("layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if named:
        return tuple(int(layer) for layer in named)
    layers = int(speculation.target_model_config.hf_text_config.num_hidden_layers)
    return (2, layers // 2, layers - 3)


def _set_worker(config: VllmConfig) -> None:
    found = config.parallel_config.worker_cls
    if found not in (*WORKERS, *WORKERS.values()):
        raise ValueError(
            f"exits run in a worker of their own, and this engine has the worker {found!r}; known: {', '.join(WORKERS)}"
        )
    config.parallel_config.worker_cls = WORKERS.get(found, found)
    if config.use_v2_model_runner:
        processors = list(config.model_config.logits_processors or ())
        if PROCESSOR not in processors:
            config.model_config.logits_processors = [*processors, PROCESSOR]


def _set_scheduler(config: VllmConfig) -> None:
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise ValueError(
            f"contracts and audits need a scheduler of their own, and this engine has {scheduler.scheduler_cls!r}; "
            "leave --scheduler-cls out"
        )
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER

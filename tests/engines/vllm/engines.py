"""In-process engines on the embedded reasoner, and problems for them."""

import json

from ace_learn.engines.vllm.settings import Settings
from ace_learn.reasoner import weights_path
from ace_learn.tasks import TaskConfig, build_task, render_prompt
from ace_learn.testing.vllm.engine import running_engine

SPECULATION = {
    "none": None,
    "self": {"method": "draft_model", "model": str(weights_path()), "num_speculative_tokens": 4},
}


def running(*, settings=None, speculation="none", asynchronous=False, ours=True, **options):
    """A `vllm.LLM`, configured for this package or not, shut down at the end of the block."""
    return running_engine(
        weights_path(),
        settings=(settings or Settings()).to_json() if ours else None,
        speculation=SPECULATION[speculation],
        async_scheduling=asynchronous,
        **{"max_model_len": 1024, **options},
    )


def scheduler_of(llm):
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def examples(count, seed=3):
    """Problems of the reasoner's families, each with its contract."""
    return list(build_task(TaskConfig(name="reasoner")).examples(count, seed))


def prompts_of(target, problems):
    """Token ids of problems, thinking opened by the template."""
    return [tuple(render_prompt(target.tokenizer, p.messages, thinking=True, markers=target.markers)) for p in problems]


def asked(params, contract, **extra):
    """Sampling parameters of a request with a contract."""
    from vllm import SamplingParams

    return SamplingParams(**params, extra_args={"ace_contract": json.dumps(contract.to_spec()), **extra})


def outcome(output, choice=0):
    """What a client sees of a choice."""
    done = output.outputs[choice]
    return tuple(done.token_ids), done.text, done.finish_reason, done.stop_reason

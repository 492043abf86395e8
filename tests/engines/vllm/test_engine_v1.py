"""Engines on the V1 runner, in this process, against the HF engine."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ace_learn.engines.loading import load_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.vllm.settings import Settings
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import BREAKS, END_THINK, EOS, SPECIAL, tiny_prompts, write_tiny_models
from ace_learn.testing.vllm.speculation import speculation_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, TOKENS = 16, 72


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_models(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def ending(models, tmp_path_factory):
    """A target that often says <eos> where it would have closed a paragraph."""
    folder = tmp_path_factory.mktemp("ending")
    load_target(TargetConfig(model=str(models.target), device="cpu")).tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(models.target)
    with torch.no_grad():
        rows = model.lm_head.weight[len(SPECIAL) : len(SPECIAL) + len(BREAKS)]
        model.lm_head.weight[EOS] = 1.1 * rows[3]
    model.save_pretrained(folder)
    return folder


def asked():
    return [Request(key=i, prompt_ids=tuple(p), max_new_tokens=TOKENS) for i, p in enumerate(tiny_prompts(REQUESTS))]


def reference(model, head, **options):
    """Writes a head for a model, and says what the HF engine makes of it."""
    target = load_target(TargetConfig(model=str(model), dtype="float32", device="cpu"))
    write_test_head(head, target, asked(), **options)
    engine = load_engine(str(model), head=head, sampling=Sampling(temperature=0.0))
    return engine.generate(asked())


def generate(llm, *, extra_args=None, **params):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in asked()]
    shared = {"temperature": 0.0, "max_tokens": TOKENS} | params
    if not isinstance(extra_args, list):
        extra_args = [extra_args] * len(prompts)
    given = [SamplingParams(extra_args=keys, **shared) for keys in extra_args]
    return llm.generate(prompts, given, use_tqdm=False)


def ids_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


ON = {"ace_enabled": True}


WAYS = [("none", False), ("none", True), ("draft_model", False), ("draft_model", True)]
"""How tokens are drafted, and whether the rule is compiled (without drafts, rows then wait)."""


@pytest.mark.parametrize(("drafting", "compiled"), WAYS)
def test_exits_are_those_of_the_hf_engine_and_only_for_who_asks(models, tmp_path, drafting, compiled):
    expected = reference(models.target, tmp_path)
    assert sum(output.exit is not None for output in expected) >= REQUESTS // 3
    settings = {"head": str(tmp_path), "compile": compiled}
    with running_engine(models.target, settings=settings, speculation=speculation_of(drafting, models)) as llm:
        off = ids_of(generate(llm))
        on = generate(llm, extra_args=ON, logprobs=0)
        mixed = ids_of(generate(llm, extra_args=[ON, None, {**ON, "ace_shadow": True}, ON] * (REQUESTS // 4)))
        worker = llm.llm_engine.model_executor.driver_worker.worker
        generate(llm, max_tokens=1)  # the last requests are let go of with the next step
        assert worker.ace_status() == {"exits": True, "off": False, "followed": 0, "slots": 0}
    full, early = ids_of(on), [list(output.token_ids) for output in expected]
    assert full == early
    assert sum(a != b for a, b in zip(off, early, strict=True)) >= REQUESTS // 3
    wanted = [early, off, off, early] * (REQUESTS // 4)
    assert mixed == [answers[i] for i, answers in enumerate(wanted)]
    forced = [  # raw log-probabilities stay the model's
        next(iter(values.values())).logprob
        for output in on
        for token, values in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        if token == END_THINK
    ]
    assert forced
    assert all(-200 < value < -1 for value in forced)


@pytest.mark.parametrize(("drafting", "compiled"), WAYS)
def test_a_stop_token_ends_the_thinking_where_exits_are_on_and_the_request_elsewhere(
    models, ending, tmp_path, drafting, compiled
):
    expected = reference(ending, tmp_path, share=0.25)
    by_stop = [output for output in expected if output.exit is None and output.think_end is not None]
    assert len(by_stop) >= 2
    assert all(EOS not in output.token_ids[: output.think_end] for output in by_stop)
    settings = {"head": str(tmp_path), "compile": compiled}
    with running_engine(ending, settings=settings, speculation=speculation_of(drafting, models)) as llm:
        assert ids_of(generate(llm, extra_args=ON)) == [list(output.token_ids) for output in expected]
        stock = ids_of(generate(llm))
        assert any(END_THINK not in ids and ids[-1] == EOS for ids in stock)
        endless = ids_of(generate(llm, extra_args=ON, ignore_eos=True))
    assert any(EOS in ids[:-1] for ids in endless)


def test_a_head_for_another_target_is_refused_before_weights_are_loaded(models, tmp_path):
    reference(models.target, tmp_path)
    with pytest.raises(ValueError, match="fingerprint"), running_engine(models.mimo, settings={"head": str(tmp_path)}):
        pass


def test_an_engine_without_our_object_has_stock_classes_and_outputs(models, tmp_path):
    reference(models.target, tmp_path)
    with running_engine(models.target, settings=None) as llm:
        stock = ids_of(generate(llm))
        worker = llm.llm_engine.model_executor.driver_worker.worker
        assert type(worker).__module__.startswith("vllm.")
    with running_engine(models.target, settings={"head": str(tmp_path)}) as llm:
        assert ids_of(generate(llm)) == stock


def test_the_offline_engine_is_a_plain_llm(models, tmp_path):
    from vllm import LLM

    from ace_learn.engines.vllm import llm

    expected = [list(output.token_ids) for output in reference(models.target, tmp_path)]
    with pytest.raises(ValueError, match="two heads"):
        llm(str(models.target), head=tmp_path, settings=Settings(head="elsewhere"))
    with pytest.raises(ValueError, match="leave it out"):
        llm(str(models.target), head=tmp_path, additional_config={"ace_learn": {}})
    engine = llm(str(models.target), head=tmp_path, dtype="float32", enforce_eager=True, max_model_len=256)
    try:
        assert type(engine) is LLM
        assert ids_of(generate(engine, extra_args=ON)) == expected
    finally:
        engine.llm_engine.engine_core.shutdown()

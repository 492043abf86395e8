import asyncio
import json
from types import SimpleNamespace

import pytest

from ace_learn.engines.vllm.validation import Admission, _admitting, _checking_early, admission_of
from ace_learn.exit import ExitPolicy
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.testing.vllm.models import tiny_prompts, write_tiny_models

CONTRACTS = {"contracts": {"number": {"kind": "integer"}}}


def engine(settings):
    config = SimpleNamespace(additional_config={} if settings is None else {"ace_learn": settings})
    return SimpleNamespace(input_processor=SimpleNamespace(vllm_config=config))


def params(extra_args):
    return SimpleNamespace(extra_args=extra_args)


@pytest.fixture
def head(tmp_path):
    (tmp_path / "policy.json").write_text(json.dumps(ExitPolicy.specexit().to_json()))
    return str(tmp_path)


def admit(processor, extra_args):
    request = SimpleNamespace(sampling_params=params(extra_args))
    return _admitting(lambda self, *args: request)(processor, "r", "prompt").sampling_params.extra_args


def test_good_requests_pass_untouched_and_bad_ones_do_not_pass():
    processor = engine(CONTRACTS).input_processor
    good = {"ace_contract": "number", "other": object}
    assert admit(processor, good) is good
    assert admit(processor, None) is None
    with pytest.raises(ValueError, match="no name of the server's table"):
        admit(processor, {"ace_contract": "nmuber"})


def test_requests_without_sampling_pass():
    request = SimpleNamespace(sampling_params=None)
    assert _admitting(lambda self: request)(engine(CONTRACTS).input_processor) is request


def test_an_engine_that_is_not_configured_ignores_the_keys():
    keys = {"ace_contract": 3}
    assert admit(engine(None).input_processor, keys) is keys


def test_a_stream_is_refused_by_the_call_itself():
    async def generate(self, prompt, sampling_params, request_id):
        yield request_id

    checked = _checking_early(generate)
    with pytest.raises(ValueError, match="did you mean ace_contract"):
        checked(engine(CONTRACTS), "prompt", params({"ace_contrcat": "number"}), "r")

    async def first():
        return [item async for item in checked(engine(CONTRACTS), "prompt", params({"ace_contract": "number"}), "r")]

    assert asyncio.run(first()) == ["r"]


def test_streaming_input_is_refused_with_our_keys_alone():
    async def pieces():
        yield "prompt"

    checked = _checking_early(lambda *args: "started")
    assert checked(engine(CONTRACTS), pieces(), params({"other": 1}), "r") == "started"
    assert checked(engine(None), pieces(), params({"ace_contract": "number"}), "r") == "started"
    with pytest.raises(ValueError, match="streaming input knows no ace_ keys"):
        checked(engine(CONTRACTS), pieces(), params({"ace_contract": "number"}), "r")


def test_the_switch_stamps_requests_with_exits_that_enter_from_then_on(head):
    processor = engine({"head": head, "runtime_switch": True}).input_processor
    asked = {"ace_enabled": True}
    assert admit(processor, asked) is asked
    admission_of(processor).shadow = True
    assert admit(processor, asked) == {"ace_enabled": True, "ace_shadow": True}
    assert asked == {"ace_enabled": True}
    assert admit(processor, None) is None
    admission_of(processor).shadow = False
    assert admit(processor, asked) is asked


def test_a_server_that_starts_in_shadow_mode_can_be_switched_out_of_it(head):
    admission = Admission({"ace_learn": {"head": head, "runtime_switch": True, "shadow": True}})
    assert admission.stamped({"ace_enabled": True}) == {"ace_enabled": True, "ace_shadow": True}
    admission.shadow = False
    keys = admission.stamped({"ace_enabled": True})
    assert not admission.check(keys).shadow
    fixed = Admission({"ace_learn": {"head": head, "shadow": True}})
    fixed.shadow = False
    assert fixed.check({"ace_enabled": True}).shadow


@pytest.mark.vllm
@pytest.mark.slow
def test_an_offline_engine_refuses_before_it_runs(tmp_path):
    pytest.importorskip("vllm")
    models = write_tiny_models(tmp_path / "models")
    with running_engine(models.target, settings=CONTRACTS) as llm:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in tiny_prompts(2)]
        bad = SamplingParams(max_tokens=4, extra_args={"ace_enabled": True})
        with pytest.raises(ValueError, match="this server has no head folder"):
            llm.generate(prompts, bad, use_tqdm=False)
        good = SamplingParams(max_tokens=4, extra_args={"ace_contract": "number"})
        assert len(llm.generate(prompts, good, use_tqdm=False)) == 2

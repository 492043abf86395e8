"""The tiny models in transformers; no engine."""

import pytest

from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.fingerprint import checkpoint_fingerprint
from ace_learn.models.target import TargetConfig, load_draft_model, load_target
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import END_THINK, SPECIAL, THINK, USER, tiny_prompts, write_tiny_models

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_models(tmp_path_factory.mktemp("models"))


def load(folder):
    return load_target(TargetConfig(model=str(folder), dtype="float32", device="cpu"))


def requests():
    return [
        Request(key=i, prompt_ids=tuple(ids), max_new_tokens=64, min_tokens=64)
        for i, ids in enumerate(tiny_prompts(24))
    ]


# The import hook that checks shapes refuses transformers' configs: they take more arguments than they name.
@pytest.mark.parametrize("name", ["target", pytest.param("mimo", marks=pytest.mark.vllm)])
def test_both_targets_think_to_the_cap_and_pass_boundaries(models, name, tmp_path):
    target = load(getattr(models, name))
    assert target.identity.fingerprint == checkpoint_fingerprint(getattr(models, name), tied=False)
    outputs = HFEngine(target, sampling=GREEDY).generate(requests())
    assert all(token >= len(SPECIAL) for output in outputs for token in output.token_ids)
    policy = write_test_head(tmp_path, target, requests(), share=0.6)
    early = load_engine(str(getattr(models, name)), head=tmp_path, sampling=GREEDY).generate(requests())
    exits = [output.exit.output_index for output in early if output.exit is not None]
    assert 10 <= len(exits) <= 18
    assert len(set(exits)) >= 5
    assert min(exits) >= policy.min_thinking_tokens


def test_a_copy_is_always_accepted_and_a_noisy_one_sometimes(models):
    target = load(models.target)
    rates = {}
    for name in ("draft", "noisy"):
        draft = load_draft_model(str(getattr(models, name)), target)
        drafter = ModelDrafter(draft, sampling=GREEDY, vocab_size=target.vocab_size)
        outputs = HFEngine(target, sampling=GREEDY, drafter=drafter, num_draft_tokens=4).generate(requests())
        rates[name] = sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs)
    assert rates["draft"] > 0.97
    assert 0.1 < rates["noisy"] < 0.7


def test_prompts_leave_the_think_block_open_or_closed():
    assert {(ids[0], ids[-1]) for ids in tiny_prompts(5)} == {(USER, THINK)}
    assert {tuple(ids[-2:]) for ids in tiny_prompts(5, think=False)} == {(THINK, END_THINK)}
    assert max(map(len, tiny_prompts(200, longest=9))) == 9

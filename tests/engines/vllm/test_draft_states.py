"""Heads on the drafter's hidden states: exits in vLLM are those of the HF engine."""

import shutil
from dataclasses import replace

import pytest
import torch

from ace_learn.engines.loading import load_drafter, load_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.draft_files import EMBEDDED_DRAFT, load_draft
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.reasoner import drafter_path, weights_path
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.testing.vllm.cells import Cell, CellRequest, run_interpreted
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import tiny_prompts, write_tiny_models
from ace_learn.testing.vllm.watch import watching
from tests.engines.test_hidden_drafter import slow_drafts
from tests.engines.vllm.engines import examples, prompts_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, TOKENS, K = 12, 160, 4
GREEDY = Sampling(temperature=0.0)
DRAFTER = DrafterConfig(kind="eagle3", model=EMBEDDED_DRAFT, draft_tokens=K)
# Prompts come in chunks, and there is room for few requests.
# fmt: off
MODES = {
    "plain": {},
    "two drafts": {"num_speculative_tokens": 2},
    "asynchronous": {"async_scheduling": True},
    "chunked, preempted": {
        "max_num_batched_tokens": 24, "block_size": 32, "num_gpu_blocks_override": 14, "max_model_len": 288,
    },
    "cached prompts": {"enable_prefix_caching": True, "block_size": 32},
}
# fmt: on


def asked(prompts, tokens=TOKENS):
    return [Request(key=i, prompt_ids=tuple(ids), max_new_tokens=tokens) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def prompts(reasoner_target):
    return prompts_of(reasoner_target, examples(REQUESTS))


@pytest.fixture(scope="module")
def head(reasoner_target, prompts, tmp_path_factory):
    """It reads nothing but the drafter's states."""
    folder = tmp_path_factory.mktemp("head")
    drafter = load_drafter(DRAFTER, reasoner_target, GREEDY, states_delay=K + 1)
    write_test_head(
        folder, reasoner_target, asked(prompts), sources=("draft",), drafter=drafter, share=0.7, min_thinking_tokens=20
    )
    return folder


@pytest.fixture(scope="module")
def expected(head, prompts):
    return load_engine(str(weights_path()), head=head, sampling=GREEDY, drafter=DRAFTER).generate(asked(prompts))


def engine(head, *, num_speculative_tokens=K, model=None, **options):
    speculation = {"method": "eagle3", "model": str(model or drafter_path())}
    speculation["num_speculative_tokens"] = num_speculative_tokens
    options = {"max_model_len": 512} | options
    return running_engine(weights_path(), settings={"head": str(head)}, speculation=speculation, **options)


def spying(llm):
    """What the hook is told of the drafter's states: by request and position, the latest."""
    hook, seen = llm.llm_engine.model_executor.driver_worker.worker.exits.hook, {}
    keep = hook.keep_drafted

    def keep_drafted(request_ids, read):
        rows = read()
        for request_id, first, last in zip(request_ids, rows.first.tolist(), rows.last.tolist(), strict=True):
            for i in range(first, last + 1):
                seen[request_id.split("-")[0], int(rows.positions[i])] = rows.hidden[i].clone()
        keep(request_ids, lambda: rows)

    hook.keep_drafted = keep_drafted
    return seen


def generate(llm, prompts, tokens=TOKENS):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, extra_args={"ace_enabled": True})
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    records = [output.kv_transfer_params["ace_learn"] for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], records, [output.request_id for output in outputs]


@pytest.mark.parametrize("mode", MODES)
def test_states_and_exits_are_those_of_the_hf_engine(reasoner_target, head, prompts, expected, mode):
    exits = [None if output.exit is None else output.exit.output_index for output in expected]
    assert REQUESTS // 2 <= sum(at is not None for at in exits) < REQUESTS
    assert len(set(exits)) >= REQUESTS // 3
    with engine(head, **MODES[mode]) as llm, watching(llm) as watched:
        for _ in range(2 if mode == "cached prompts" else 1):
            seen = spying(llm)
            found, records, names = generate(llm, prompts)
    assert watched.tokens_per_step > 1.5
    assert watched.failures == 0
    assert (watched.preemptions > 0) == ("preempted" in mode)
    by_policy = [record["exit_position"] if record["reason"] == "policy" else None for record in records]
    assert by_policy == exits
    assert found == [list(output.token_ids) for output in expected]
    draft, compared = load_draft(drafter_path(), reasoner_target), 0
    for name, prompt, ids in zip(names, prompts, found, strict=True):
        _, states = slow_drafts(draft, reasoner_target, [*prompt, *ids], 1)
        for position in range(len(prompt) + len(ids) - 1):
            if mode != "cached prompts" or (name, position) in seen:
                assert torch.allclose(seen[name, position], states[position], atol=1e-3), (name, position)
                compared += 1
    assert compared > 1000
    assert any((name, 0) not in seen for name in names) == (mode == "cached prompts")


def test_exits_on_model_runner_v2_are_those_of_the_hf_engine(head, prompts, expected):
    chosen = [i for i, ids in enumerate(prompts) if len(ids) <= 56][:8]
    assert sum(expected[i].exit is not None for i in chosen) >= 4
    requests = tuple(
        CellRequest(prompt_ids=prompts[i], max_tokens=TOKENS, ignore_eos=False, extra_args={"ace_enabled": True})
        for i in chosen
    )
    cell = Cell(
        name="eagle3",
        model=str(weights_path()),
        settings={"head": str(head)},
        speculation={"method": "eagle3", "model": str(drafter_path()), "num_speculative_tokens": K},
        requests=requests,
    )
    longer = {"max_model_len": 224, "num_gpu_blocks_override": 15}
    for result in run_interpreted([cell, replace(cell, mode="chunked", options=longer)]):
        assert result.token_ids == [list(expected[i].token_ids) for i in chosen]
        assert result.watched.failures == 0
        assert result.watched.tokens_per_step > 1.5


def test_exits_by_the_states_of_an_mtp_layer_are_those_of_the_hf_engine(tmp_path):
    mimo = write_tiny_models(tmp_path / "tiny").mimo
    target = load_target(TargetConfig(model=str(mimo), dtype="float32", device="cpu"))
    prompts, config = tiny_prompts(REQUESTS), DrafterConfig(kind="mtp", model=str(mimo), draft_tokens=K)
    drafter, requests = load_drafter(config, target, GREEDY, states_delay=K + 1), asked(prompts, 72)
    write_test_head(tmp_path / "head", target, requests, sources=("draft",), drafter=drafter)
    hf = load_engine(str(mimo), head=tmp_path / "head", sampling=GREEDY, drafter=config)
    expected = hf.generate(requests)
    assert sum(output.exit is not None for output in expected) >= REQUESTS // 3
    speculation = {"method": "mtp", "num_speculative_tokens": K}
    settings = {"head": str(tmp_path / "head")}
    with running_engine(mimo, settings=settings, speculation=speculation) as llm, watching(llm) as watched:
        found, *_ = generate(llm, prompts, 72)
    assert watched.tokens_per_step > 1.05
    assert found == [list(output.token_ids) for output in expected]


def test_another_drafter_is_refused(head, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(drafter_path(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ValueError, match="trained with another drafter"), engine(head, model=folder):
        pass

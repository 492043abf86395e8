import dataclasses
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ace_learn.reasoner import attention, compose_trace, generate_problems
from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.data import (
    BATCHES_PER_CHUNK,
    IGNORED,
    TraceStream,
    build_tokenizer,
    collate,
    encode_trace,
)
from ace_learn.reasoner.optimizer import MuonAdamW, orthogonalize
from ace_learn.reasoner.training import build_model, train_reasoner

# Lightning 2.6 asks `isinstance(_, torch.utils._pytree.LeafSpec)`, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

TINY = ReasonerTrainingConfig(
    steps=3,
    batch_size=2,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=16,
    tokenizer_samples=40,
    warmup_steps=100,
    checkpoint_every=1,
    precision="32-true",
)
TOKENIZER = build_tokenizer(TINY)


def run(tmp_path, name, **changes):
    config = dataclasses.replace(
        TINY, work_dir=str(tmp_path / name), output_dir=str(tmp_path / f"{name}-out"), **changes
    )
    return AutoModelForCausalLM.from_pretrained(train_reasoner(config))


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = run(tmp_path, "whole").state_dict()
    part = run(tmp_path, "parts", steps=2).state_dict()
    resumed = run(tmp_path, "parts").state_dict()
    assert any(not torch.equal(whole[name], part[name]) for name in whole)
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name


def test_a_run_may_start_from_a_finished_one(tmp_path):
    first = run(tmp_path, "first", steps=2).state_dict()
    folder = str(tmp_path / "first-out")
    second = run(tmp_path, "second", steps=1, start_from=folder, learning_rate=0.0, matrix_rate=0.0).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def test_the_export_is_a_plain_folder_with_its_recipe(tmp_path):
    model = run(tmp_path, "run", steps=1)
    folder = tmp_path / "run-out"
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["steps_done"] == 1
    assert recipe["config"]["seed"] == TINY.seed
    assert recipe["final_loss"] > 0


def test_the_stream_can_be_entered_anywhere():
    start = iter(TraceStream(TINY, TOKENIZER, lambda: 0))
    batches = [next(start) for _ in range(BATCHES_PER_CHUNK + 3)]
    for step in (1, BATCHES_PER_CHUNK - 1, BATCHES_PER_CHUNK, BATCHES_PER_CHUNK + 2):
        entered = next(iter(TraceStream(TINY, TOKENIZER, lambda step=step: step)))
        assert torch.equal(entered.input_ids, batches[step].input_ids)


@pytest.mark.parametrize("mode", ["full", "unchecked", "direct"])
def test_loss_falls_on_the_reply_alone(mode):
    problem = next(generate_problems("chain", 1, seed=0))
    trace = compose_trace(problem, random.Random(0), mode=mode)
    batch = collate([encode_trace(TOKENIZER, problem, trace)], pad_id=0)
    learned = batch.labels[0] != IGNORED
    assert torch.equal(batch.labels[0][learned], batch.input_ids[0][learned])
    thought = f"<think>\n{trace.think}</think>\n\n" if trace.think else ""
    assert TOKENIZER.decode(batch.labels[0][learned]) == f"{thought}{trace.answer}<|im_end|>"
    unlearned = TOKENIZER.decode(batch.input_ids[0][~learned])
    assert unlearned.startswith(f"<|im_start|>user\n{problem.prompt}<|im_end|>\n<|im_start|>assistant\n")


def test_the_default_model_fits_the_repository():
    config = ReasonerTrainingConfig()
    model = build_model(config, TOKENIZER)
    assert 4 * sum(weight.numel() for weight in model.parameters()) <= 8e6


def test_orthogonalize_levels_singular_values():
    torch.manual_seed(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        level = torch.linalg.svdvals(orthogonalize(torch.randn(shape), iterations=8))
        assert level.min() > 0.6
        assert level.max() < 1.3


def test_adamw_part_equals_torch():
    start, target = torch.randn(7), torch.randn(7)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [
        MuonAdamW([], [ours], matrix_rate=0.0, other_rate=0.01),
        torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for _ in range(20):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("length", [1, attention.BLOCK, 2 * attention.BLOCK + 5])
def test_blocked_attention_equals_torch(length):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    ours, _ = attention.blocked_attention(torch.nn.Module(), query, key, value, None, scaling=8**-0.5)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    gradients = [torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (ours, theirs)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)

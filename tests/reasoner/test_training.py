import dataclasses
import json
import random

import pytest
import torch
from jsonargparse import ArgumentParser
from transformers import AutoModelForCausalLM, AutoTokenizer

from ace_learn.reasoner import compose_trace, generate_problems
from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.data import (
    BATCHES_PER_CHUNK,
    IGNORED,
    TraceStream,
    build_tokenizer,
    collate,
    encode_trace,
)
from ace_learn.reasoner.training import build_model, train_reasoner

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


def test_the_recipe_parses(pytestconfig):
    parser = ArgumentParser()
    parser.add_class_arguments(ReasonerTrainingConfig, "config")
    parser.add_argument("--file", action="config")
    parsed = parser.parse_args([f"--file={pytestconfig.rootpath / 'training' / 'reasoner.yaml'}"])
    config = parser.instantiate_classes(parsed).config
    assert isinstance(config, ReasonerTrainingConfig)
    assert config.steps > 0

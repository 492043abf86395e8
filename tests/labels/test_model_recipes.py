"""The recipes of the two models, from problems to a head, on shrunk random copies of their architecture and layout."""

import json
from pathlib import Path

import pytest
import yaml

from ace_learn.cli.build import main as build
from ace_learn.cli.train import main as train
from ace_learn.features import FeatureStore, shard_folders
from ace_learn.heads import load_head
from ace_learn.labels.records import read_records
from ace_learn.tasks.chat import render_prompt
from ace_learn.thinking import ThinkMarkers
from tests.helpers.models import (
    QWEN3_4B_THINKING,
    QWEN_MARKS,
    QWEN_OPENS,
    R1_DISTILL_LLAMA_8B,
    R1_LEAVES_TO_MODEL,
    R1_MARKS,
    R1_OPENS,
    layout_tokenizer,
    save_shrunk,
)

ROOT = Path(__file__).parents[2]
BEGIN, END, _, ASSISTANT = R1_MARKS
QWEN = {"marks": QWEN_MARKS, "bos": None, "eos": "<|im_end|>"}
R1 = {"marks": R1_MARKS, "bos": BEGIN, "eos": END}


@pytest.mark.parametrize(
    ("template", "tokens", "tail", "closed"),
    [
        (QWEN_OPENS, QWEN, ["<think>", "\n"], ["<think>", "\n", "</think>"]),
        (R1_OPENS, R1, [ASSISTANT, "<think>", "\n"], ["<think>", "\n", "</think>"]),
        (R1_LEAVES_TO_MODEL, R1, [ASSISTANT], [ASSISTANT, "<think>", "</think>"]),
    ],
)
def test_prompts_with_and_without_thinking(template, tokens, tail, closed):
    tokenizer = layout_tokenizer(template, **tokens)
    markers = ThinkMarkers.from_tokenizer(tokenizer)
    assert "<think>" not in tokenizer.all_special_tokens
    chat = [{"role": "user", "content": "7?"}]
    for thinking, expected in ((True, tail), (False, closed)):
        ids = render_prompt(tokenizer, chat, thinking=thinking, markers=markers)
        assert tokenizer.convert_ids_to_tokens(ids)[-len(expected) :] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "real", "template", "tokens", "opened"),
    [
        ("qwen3-4b-thinking", QWEN3_4B_THINKING, QWEN_OPENS, QWEN, True),
        ("deepseek-r1-distill-llama-8b", R1_DISTILL_LLAMA_8B, R1_LEAVES_TO_MODEL, R1, False),
    ],
)
def test_the_recipes_of_a_model_build_and_train(tmp_path, name, real, template, tokens, opened):
    thinks_after = None if opened else ASSISTANT
    model = save_shrunk(tmp_path / "model", real, template, **tokens, thinks_after=thinks_after)
    table = tmp_path / "table.jsonl"
    rows = [{"prompt": f"the sum is {i % 10}{i // 10}?", "gold": str(7 + i % 3)} for i in range(40)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"{{name: table, path: {table}, contract: {{kind: boxed}}, gold_column: gold, instruct: false}}"
    dataset, head = tmp_path / "dataset", tmp_path / "head"
    build([
        str(ROOT / "data_builders" / f"{name}.yaml"), "--target.model", str(model), "--target.device", "cpu",
        "--task", task, "--output", str(dataset), "--splits", "{train: 20, validation: 12, calibration: 2, test: 2}",
        "--max_new_tokens", "160", "--max_answer_tokens", "24", "--batch_size", "18", "--shard_size", "18",
    ])  # fmt: skip
    train([
        str(ROOT / "training" / f"{name}.yaml"), "--dataset", str(dataset), "--output", str(head),
        "--max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.progress_bar", "false",
    ])  # fmt: skip
    records = [r for shard in shard_folders(dataset) for r in read_records(shard / "traces.parquet")]
    usable = [r for r in records if not r.excluded]
    assert len(usable) >= 10
    assert all((r.think_start == 0) == opened for r in usable)
    store = FeatureStore(dataset)
    assert store.dataset.text("feature_dtype") == "bfloat16"
    sampling = yaml.safe_load((ROOT / "data_builders" / f"{name}.yaml").read_text())["sampling"]
    assert sampling.items() <= store.dataset.fields("sampling").data.items()
    card = load_head(head).card
    assert card.spec == store.spec
    assert card.spec.hidden_size == 48
    assert card.data_sha256 == store.sha256

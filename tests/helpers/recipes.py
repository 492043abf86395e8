"""The first stage of each recipe, made so small that a tiny random model goes through it in seconds."""

import contextlib
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from ace_learn.features import SOURCES
from ace_learn.tasks.sets import data_set_names
from tests.helpers.loopback import Loopback, tokens_of
from tests.helpers.targets import WORDS, tiny_tokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "tasks" / "data"

LABELS = ("billing", "delivery", "returns", "other")
ANSWERS = [
    *(f"\\boxed{{{letter}}}" for letter in "ABC"),
    *(f"\nAnswer: {letter}\n" for letter in "ABC"),
    *(f"<code>{name} = 1</code>" for name in "abcdefgh"),
    *(f"\nLabel: {label}\n" for label in LABELS),
    *(f"\nThe answer: {label}\n" for label in LABELS),
    *(f'\n{{"name": "Ada", "year": {year}}}\n' for year in range(1815, 1823)),
]
"""What the tiny model may say beside the boxed digits in WORDS: an answer under each contract of the recipes."""


class Mini(NamedTuple):
    """What the stages before a recipe's have made."""

    model: Path
    dataset: Path
    head: Path
    policy: Path


class Stage(NamedTuple):
    """A recipe on its way through its first stage."""

    module: str
    """What `python -m` runs."""
    argv: list[str]
    """Its arguments, by the recipe's first line."""
    values: dict
    """What the recipe says."""
    folder: Path
    """Empty; all output goes there."""
    mini: Mini

    def run(self, *flags: object) -> None:
        """Runs the command with more flags, which beat the recipe."""
        command([self.module, *self.argv, *map(str, flags)])


def command(argv: list[str]) -> None:
    """Runs `python -m MODULE ARGUMENTS` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        patch.delitem(sys.modules, f"{argv[0]}.__main__", raising=False)
        patch.delitem(sys.modules, argv[0], raising=False)  # else runpy warns that it runs twice
        runpy.run_module(argv[0], run_name="__main__")


def save_model(folder: Path) -> None:
    """A tiny random model with room for long prompts, which thinks, stops and answers when it is sampled."""
    words = WORDS + ANSWERS
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=words.index("<eos>"),
        pad_token_id=words.index("<eos>"),
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer(words=words).save_pretrained(folder)


def make_mini(folder: Path) -> Mini:
    """A tiny model, a data set of it with everything that a head can read, a head and its policy."""
    # Under jaxtyping's import hook the library would be compiled anew, and its syntax warnings are errors.
    importlib.import_module("reasoning_gym")
    mini = Mini(*(folder / name for name in Mini._fields))
    save_model(mini.model)
    rows = [{"prompt": f"the sum is {i}?", "gold": str(7 + i % 3)} for i in range(100)]
    table = folder / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "name": "table",
        "path": str(table),
        "gold_column": "gold",
        "instruct": False,
        "contract": {"kind": "boxed"},
    }
    recipe = {
        "task": task,
        "splits": {"train": 40, "validation": 20, "calibration": 20, "test": 20},
        "features": {"sources": [source for source in SOURCES if source not in ("draft", "acceptance")], "rows": "all"},
        "output": str(mini.dataset),
        "max_new_tokens": 200,
        "max_answer_tokens": 30,
        "batch_size": 100,
        "shard_size": 100,
    }
    path = folder / "build.yaml"
    path.write_text(yaml.safe_dump(recipe))
    command(["ace_learn.build", str(path), *model_flags(mini)])
    quiet = ["--trainer.accelerator", "cpu", "--trainer.progress_bar", "false", "--max_epochs", "1"]
    inputs = ["--dataset", str(mini.dataset)]
    command(["ace_learn.train", *inputs, "--output", str(mini.head), *quiet])
    inputs += ["--head", str(mini.head), "--output", str(mini.policy)]
    command(["ace_learn.calibrate", *inputs, "--risk.alpha", "0.5"])
    return mini


def model_flags(mini: Mini) -> list[str]:
    """The tiny model as target."""
    return ["--target.model", str(mini.model), "--target.dtype", "float32", "--target.device", "cpu"]


def task_flags(values: dict) -> list[str]:
    """The fixture instead of a data set of the hub; files and generated problems stay as they are."""
    task = values.get("task", {})
    if task.get("name") in data_set_names():
        return ["--task.path", str(DATA / task["name"])]
    assert task.get("name") != "hub", (
        "no fixture for data sets read by the task `hub`; describe it in ace_learn.tasks.sets"
    )
    return []


def build(stage: Stage) -> Path:
    """Three problems of the recipe's own task, with its own sampling, probing and features."""
    output = stage.folder / "dataset"
    size = ["--splits", '{"train": 2, "test": 1}', "--batch_size", 4, "--shard_size", 4]
    if stage.values.get("target", {}).get("model") != "ace_learn/reasoner":
        size += [*model_flags(stage.mini), "--max_new_tokens", 400, "--max_answer_tokens", 60]
    stage.run("--output", output, *size, *task_flags(stage.values))
    return output / "dataset.json"


def train(stage: Stage) -> Path:
    """One epoch on the miniature data set."""
    if stage.values.get("kind", "head") != "head":
        return train_draft(stage)
    output = stage.folder / "head"
    one = ["--trainer.devices", 1] if "devices" in stage.values.get("trainer", {}) else []
    quiet = ["--trainer.accelerator", "cpu", "--trainer.progress_bar", "false", *one]
    stage.run("--dataset", stage.mini.dataset, "--output", output, "--max_epochs", 1, *quiet)
    return output / "model.safetensors"


def train_draft(stage: Stage) -> Path:
    """One epoch of a draft for the tiny model, on the miniature data set."""
    output = stage.folder / "draft"
    size = ["--shape.vocab_size", 40] if "vocab_size" in stage.values.get("shape", {}) else []
    quiet = ["--trainer.accelerator", "cpu", "--trainer.progress_bar", "false"]
    inputs = [*model_flags(stage.mini), "--dataset", stage.mini.dataset, "--output", output]
    stage.run(*inputs, *size, "--max_epochs", 1, "--batch_size", 20, "--max_tokens", 60, *quiet)
    return output / "model.safetensors"


def bench_drafts(stage: Stage) -> Path:
    """Three problems, with drafts of the tiny model that were trained for one epoch."""
    draft, output = stage.folder / "draft", stage.folder / "study"
    inputs = ["--kind", "mtp", *model_flags(stage.mini), "--dataset", str(stage.mini.dataset), "--output", str(draft)]
    size = ["--max_epochs", "1", "--batch_size", "20", "--max_tokens", "60"]
    command(["ace_learn.train", *inputs, *size, "--trainer.accelerator", "cpu", "--trainer.progress_bar", "false"])
    drafters = {name: {"kind": "mtp", "model": str(draft)} for name in stage.values["drafters"]}
    inputs = [*model_flags(stage.mini), "--dataset", stage.mini.dataset, "--drafters", json.dumps(drafters)]
    stage.run(*inputs, "--problems", 3, "--max_new_tokens", 30, "--output", output)
    return output / "acceptance.json"


def calibrate(stage: Stage) -> Path:
    """The miniature head, with a risk that a few problems can certify."""
    output = stage.folder / "policy"
    stage.run("--dataset", stage.mini.dataset, "--head", stage.mini.head, "--output", output, "--risk.alpha", 0.5)
    return output / "policy.json"


def run(stage: Stage) -> Path:
    """Two problems, live, with the miniature policy."""
    output = stage.folder / "out.jsonl"
    size = ["--problems", 2, "--max_new_tokens", 100, "--max_answer_tokens", 20, "--output", output]
    drafter = ["--drafter.model", stage.mini.model] if "model" in stage.values.get("drafter", {}) else []
    head = ["--head", stage.mini.policy] if "head" in stage.values else []
    stage.run(*model_flags(stage.mini), *head, *drafter, *task_flags(stage.values), *size)
    return output


def serve(stage: Stage) -> Path:
    """The command that would start the server, with the miniature head checked against its model."""
    output = stage.folder / "command.txt"
    head = ["--settings.head", stage.mini.policy] if "head" in stage.values.get("settings", {}) else []
    with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        stage.run("--target.model", stage.mini.model, *head, "--dry_run", "true")
    return output


def stream(stage: Stage) -> Path:
    """Two problems, sent to a server on loopback that has one answer to all."""
    output = stage.folder / "out.jsonl"
    with Loopback(script=tokens_of("<think>so</think>\\boxed{7}, done")) as server:
        stage.run("--base_url", server.base_url, "--problems", 2, "--output", output)
    return output


def ablate(stage: Stage) -> Path:
    """The data set that the recipe builds before anything else."""
    part = stage.folder / "build.yaml"
    part.write_text(yaml.safe_dump(stage.values["build"]))
    return build(stage._replace(module="ace_learn.build", argv=[str(part)], values=stage.values["build"]))


def train_reasoner(stage: Stage) -> Path:
    """Two steps of a smaller reasoner."""
    output = stage.folder / "weights"
    size = {"steps": 2, "batch_size": 2, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1,
            "intermediate_size": 16, "tokenizer_samples": 40, "precision": "32-true", "threads": 1}  # fmt: skip
    flags = [flag for name, value in size.items() for flag in (f"--{name}", value)]
    stage.run("--output_dir", output, "--work_dir", stage.folder / "work", *flags)
    return output / "model.safetensors"


def evaluate_reasoner(stage: Stage) -> Path:
    """Three problems."""
    output = stage.folder / "figures.json"
    stage.run("--problems", 3, "--greedy_problems", 3, "--output", output)
    return output


def _study(stage: Stage, *size: object) -> Path:
    """The recipe's drafter, or the miniature model with a noised copy of itself."""
    output = stage.folder / "study"
    pair: list[object] = ["--setting.max_new_tokens", 60]
    if "drafter" not in stage.values["setting"]:
        pair += [flag.replace("--target", "--setting.target") for flag in model_flags(stage.mini)]
        pair += ["--setting.noised", "{noise: 0.1, draft_tokens: 2}"]
    stage.run(*pair, "--output", output, *size)
    return output / "table.md"


def bench_rules(stage: Stage) -> Path:
    """Three problems, one budget."""
    size = ["--problems", 3, "--deltas", "[0.5]", "--epsilons", "[0.09]", "--enumerated_rows", 5]
    return _study(stage, *size)


def bench_acceptance(stage: Stage) -> Path:
    """A few problems of each workload."""
    return _study(stage, "--problems", 12, "--workload_problems", 4)


def bench_verification(stage: Stage) -> Path:
    """Two cells."""
    size = ["--problems", 3, "--fixed", "[0, 1]", "--concurrency", "[2]", "--simulated", "[2]", "--simulated_steps", 20]
    return _study(stage, *size)


RULES: dict[str, Callable[[Stage], Path]] = {
    "ace_learn.build": build,
    "ace_learn.train": train,
    "ace_learn.calibrate": calibrate,
    "ace_learn.run": run,
    "ace_learn.serve": serve,
    "ace_learn.stream": stream,
    "ace_learn.ablate": ablate,
    "ace_learn.bench drafts": bench_drafts,
    "ace_learn.bench rules": bench_rules,
    "ace_learn.bench acceptance": bench_acceptance,
    "ace_learn.bench verification": bench_verification,
    "ace_learn.reasoner train": train_reasoner,
    "ace_learn.reasoner evaluate": evaluate_reasoner,
}
"""How each command goes through its first stage; a rule returns a file that the stage must have written."""

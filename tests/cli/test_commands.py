"""The commands as a user types them: a foreign model through the whole pipeline, and bad input at each stage."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ace_learn.artifacts import sha256_folder
from ace_learn.cli import build, calibrate, run, train
from ace_learn.cli import reasoner as reasoner_command
from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.tasks.base import Example, user_message
from tests.helpers.targets import OPENED_BY_MODEL, OPENED_IN_PROMPT, save_tiny, tiny_model, tiny_tokenizer


def recipe_in(folder, architecture="llama", template=OPENED_IN_PROMPT):
    """A build recipe for a model and a tokenizer that are not ours."""
    folder.mkdir(exist_ok=True)
    save_tiny(folder / "model", architecture, template)
    rows = [{"prompt": f"the sum is {i % 10}{i // 10 % 10}{i // 100}?", "gold": str(7 + i % 3)} for i in range(200)]
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "build.yaml"
    recipe.write_text(
        f"""
target: {{model: {folder / "model"}, device: cpu}}
task: {{name: table, path: {folder / "table.jsonl"}, gold_column: gold, instruct: false, contract: {{kind: boxed}}}}
output: {folder / "dataset"}
splits: {{train: 90, validation: 40, calibration: 40, test: 20}}
max_new_tokens: 200
max_answer_tokens: 30
batch_size: 95
shard_size: 95
"""
    )
    return recipe


def pipeline(folder, recipe):
    build.main([str(recipe)])
    train.main(
        ["--dataset", str(folder / "dataset"), "--output", str(folder / "head"), "--max_epochs", "2",
         "--trainer.accelerator", "cpu", "--trainer.progress_bar", "false"]
    )  # fmt: skip
    calibrate.main(
        ["--dataset", str(folder / "dataset"), "--head", str(folder / "head"), "--output", str(folder / "policy"),
         "--risk.alpha", "0.5"]
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Folder with a finished pipeline of a tiny random Llama."""
    folder = tmp_path_factory.mktemp("pipeline") / "llama"
    pipeline(folder, recipe_in(folder))
    return folder


def refused(main, argv, capsys):
    """Exit status and message of a command that must refuse its input."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code, capsys.readouterr().err


def head_flags(folder, dataset, output):
    return ["--dataset", str(dataset), "--head", str(folder / "head"), "--output", str(output)]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "template"), [("llama", OPENED_IN_PROMPT), ("qwen2", OPENED_BY_MODEL)])
def test_a_foreign_model_goes_through_the_same_commands(architecture, template, tmp_path, capsys):
    recipe = recipe_in(tmp_path, architecture, template)
    pipeline(tmp_path, recipe)
    policy = json.loads((tmp_path / "policy" / "policy.json").read_text())
    assert policy["predicate"] in ("score", "never")
    run.main(
        ["--target.model", str(tmp_path / "model"), "--target.device", "cpu", "--head", str(tmp_path / "policy"),
         "--task.name", "table", "--task.path", str(tmp_path / "table.jsonl"), "--task.instruct", "false",
         "--task.contract", "{kind: boxed}", "--problems", "6", "--max_new_tokens", "100", "--drafter.kind", "ngram",
         "--output", str(tmp_path / "out.jsonl")]
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(line["finish_reason"] in ("stop", "contract", "length") for line in lines)
    assert all(line["verify_steps"] == sum(line["accepted_histogram"].values()) for line in lines)
    shown = capsys.readouterr().out
    assert "6 problems" in shown
    assert "tokens emitted per verify step" in shown


def test_a_prompt_is_shown_live(llama, capsys):
    run.main(
        ["--target.model", str(llama / "model"), "--target.device", "cpu", "--head", str(llama / "policy"),
         "--prompt", "the sum?", "--contract", "{kind: boxed}", "--max_new_tokens", "150"]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert re.search(r"thinking (ended by|never began|was cut by)", shown)
    assert "answer:" in shown


def test_a_shown_boundary_stands_behind_its_own_paragraph(llama, capsys):
    common = ["--target.model", str(llama / "model"), "--target.device", "cpu", "--prompt", "the sum?", "--seed", "5"]
    texts = []
    for drafter in ("none", "ngram"):
        run.main([*common, "--max_new_tokens", "150", "--sampling.temperature", "0", "--drafter.kind", drafter])
        texts.append(capsys.readouterr().out.rpartition("(finish")[0])
    assert texts[0] == texts[1]
    for part in texts[0].split("    [paragraph")[:-1]:
        assert part.endswith("\n\n")


@pytest.mark.parametrize("flag", [None, "--contract"])
def test_values_that_refer_to_themselves(flag, tmp_path, capsys):
    recipe = tmp_path / "loop.yaml"
    recipe.write_text("target: &a {model: ace_learn/reasoner, x: *a}\n")
    loop = "{kind: json, schema: &a {properties: {x: *a}}}"
    code, message = refused(run.main, [str(recipe)] if flag is None else ["--prompt", "x", flag, loop], capsys)
    assert code == 2
    assert "refers to itself" in message


def test_text_that_is_no_utf8(llama, capsys):
    argv = ["--target.model", str(llama / "model"), "--target.device", "cpu", "--prompt", "a\udcffb"]
    code, message = refused(run.main, argv, capsys)
    assert code == 2
    assert "UTF-8" in message


def test_unknown_recipe_key(llama, tmp_path, capsys):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text((llama / "build.yaml").read_text() + "bath_size: 3\n")
    code, message = refused(build.main, [str(recipe)], capsys)
    assert code == 2
    assert "bath_size" in message


def test_head_for_another_target(llama, tmp_path, capsys):
    tiny_model("llama", seed=9).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    argv = ["--target.model", str(tmp_path / "other"), "--target.device", "cpu", "--head", str(llama / "policy")]
    code, message = refused(run.main, [*argv, "--prompt", "sum"], capsys)
    assert code == 2
    assert "was trained for the target" in message
    assert str(llama / "model") in message


def test_head_without_a_policy(llama, capsys):
    argv = ["--target.model", str(llama / "model"), "--target.device", "cpu", "--head", str(llama / "head")]
    code, message = refused(run.main, [*argv, "--prompt", "sum"], capsys)
    assert code == 2
    assert "ace_learn.calibrate" in message


def test_empty_data_set(llama, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    argv = [str(llama / "build.yaml"), "--task.path", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path / "out")]
    code, message = refused(build.main, argv, capsys)
    assert code == 2
    assert "empty" in message
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_contract_that_never_commits(llama, tmp_path, capsys):
    schema = '{kind: json, schema: {type: object, required: ["answer"]}}'
    argv = [str(llama / "build.yaml"), "--task.contract", schema, "--output", str(tmp_path / "out")]
    code, message = refused(build.main, [*argv, "--task.gold_column", "null"], capsys)
    assert code == 2
    assert "never committed an answer" in message
    assert list((tmp_path / "out" / "shards").iterdir()) == []


def test_tokenizer_without_think_markers(llama, tmp_path, capsys):
    argv = [str(llama / "build.yaml"), "--target.think.end", "</reason>", "--output", str(tmp_path / "out")]
    code, message = refused(build.main, argv, capsys)
    assert code == 2
    assert "no think marker '</reason>'" in message
    assert "--target.think" in message


def test_corrupted_feature_shard(llama, tmp_path, capsys):
    shutil.copytree(llama / "dataset", tmp_path / "dataset")
    path = tmp_path / "dataset" / "shards" / "00001" / "features.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    argv = ["--dataset", str(tmp_path / "dataset"), "--output", str(tmp_path / "head"), "--trainer.accelerator", "cpu"]
    code, message = refused(train.main, argv, capsys)
    assert code == 2
    assert "00001" in message
    assert "build" in message
    assert not (tmp_path / "head" / "config.json").exists()
    code, message = refused(calibrate.main, head_flags(llama, tmp_path / "dataset", tmp_path / "policy"), capsys)
    assert code == 2
    assert "00001" in message
    assert not (tmp_path / "policy").exists()
    before = {name: sha256_folder(llama / "dataset" / "shards" / name) for name in ("00000", "00001")}
    shutil.rmtree(path.parent)  # as the message says
    code, message = refused(train.main, argv, capsys)
    assert code == 2
    assert "run build again" in message
    build.main([str(llama / "build.yaml"), "--output", str(tmp_path / "dataset")])
    assert {name: sha256_folder(tmp_path / "dataset" / "shards" / name) for name in before} == before
    train.main([*argv, "--max_epochs", "1", "--trainer.progress_bar", "false"])
    assert (tmp_path / "head" / "config.json").exists()


@pytest.mark.parametrize("name", ["traces.parquet", "features.safetensors"])
def test_damage_that_only_the_hash_sees(llama, tmp_path, capsys, name):
    shutil.copytree(llama / "dataset", tmp_path / "dataset")
    path = tmp_path / "dataset" / "shards" / "00001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    argv = ["--dataset", str(tmp_path / "dataset"), "--output", str(tmp_path / "head"), "--trainer.accelerator", "cpu"]
    for main, arguments in (
        (train.main, argv),
        (calibrate.main, head_flags(llama, tmp_path / "dataset", tmp_path / "policy")),
    ):
        code, message = refused(main, arguments, capsys)
        assert code == 2
        assert "shard 00001 is not usable" in message
        assert "SHA-256" in message
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--problems", "0"], "problems must be >= 1"),
        (["--problems", "-1"], "problems must be >= 1"),
        (["--max_answer_tokens", "-5"], "max_answer_tokens must be >= 1"),
        (["--problems", "100000000000"], "problems must be <= 100,000"),
        (["--drafter.kind", "ngram", "--drafter.draft_tokens", "0"], "draft_tokens must be >= 1"),
        (["--drafter.kind", "draft_model"], "needs `model`"),
        (["--drafter.kind", "medusa"], "medusa"),
        (["--eos_in_think", "halt"], "halt"),
        (["--output", "README.md/out.jsonl"], "README.md"),
        (
            ["--prompt", "x", "--contract", "integer"],
            "contract must be an object, such as {kind: integer}, not 'integer'",
        ),
        (["--task.contract", "integer"], "task.contract must be an object, such as {kind: integer}"),
        (["--prompt", "x", "--output", "out.jsonl"], "output would be ignored with --prompt"),
        (["--prompt", "x", "--problems", "3", "--task.name", "hub"], "task, problems would be ignored"),
        (["--contract", "{kind: boxed}"], "contract goes with --prompt"),
        (["--prompt", "x", "--contract", "{kind: nonsense}"], "unknown contract kind"),
        (["--task.name", "nonsense"], "unknown task"),
        (["--output", "README.md"], "exists already"),
    ],
)
def test_run_refuses_before_it_loads_a_model(argv, named, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    code, message = refused(run.main, ["--target.model", "/no/such/model", *argv], capsys)
    assert code == 2
    assert named in message


def run_flags(llama, output, *more):
    return ["--target.model", str(llama / "model"), "--target.device", "cpu", "--task.name", "table", "--task.path",
            str(llama / "table.jsonl"), "--task.contract", "{kind: boxed}", "--problems", "4", "--batch_size", "2",
            "--output", str(output), *more]  # fmt: skip


def test_a_run_that_is_interrupted_leaves_nothing_under_its_name(llama, tmp_path, monkeypatch, capsys):
    def interrupted(engine, requests):
        yield engine.generate(requests[:2])
        (temporary,) = tmp_path.iterdir()
        assert [json.loads(line)["key"] for line in temporary.read_text().splitlines()] == [0, 1]
        raise KeyboardInterrupt

    stream = HFEngine.stream_batches
    monkeypatch.setattr(HFEngine, "generate", lambda self, asked: [o for batch in stream(self, asked) for o in batch])
    monkeypatch.setattr(HFEngine, "stream_batches", interrupted)
    code, message = refused(run.main, run_flags(llama, tmp_path / "out.jsonl", "--max_new_tokens", "20"), capsys)
    assert code == 130
    assert "nothing was kept" in message
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_fill_the_context_are_refused_before_anything_is_decoded(llama, tmp_path, capsys):
    table = tmp_path / "long.jsonl"
    table.write_text(
        "".join(json.dumps({"prompt": f"{i} " + "the sum " * n}) + "\n" for i, n in enumerate((1, 1, 300)))
    )
    argv = run_flags(llama, tmp_path / "out.jsonl", "--task.path", str(table), "--problems", "3", "--batch_size", "1")
    code, message = refused(run.main, argv, capsys)
    assert code == 2
    assert "context of 512; shorten the prompt" in message
    assert list(tmp_path.iterdir()) == [table]


def test_run_judges_by_the_tasks_verifier(llama, tmp_path, monkeypatch):
    """A right answer that differs from gold is right where the task says so."""
    monkeypatch.setattr("ace_learn.tasks.table.TableTask._example", _always_right)
    run.main(
        ["--target.model", str(llama / "model"), "--target.device", "cpu", "--task.name", "table", "--task.path",
         str(llama / "table.jsonl"), "--task.contract", "{kind: boxed}", "--problems", "8", "--max_new_tokens", "150",
         "--output", str(tmp_path / "out.jsonl")]
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert any(line["answer"] is not None for line in lines)
    assert [line["correct"] for line in lines] == [line["answer"] is not None for line in lines]


def _always_right(task, row, where):
    contract = Contract.from_spec({"kind": "boxed"})
    return Example(
        family="any", messages=user_message(row["prompt"]), contract=contract, gold="nothing", verifier=lambda _: True
    )


_FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails with an OSError, as on a full disk
from ace_learn.cli import build
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
build.main(sys.argv[1:])
"""


def test_full_disk(llama, tmp_path):
    argv = [sys.executable, "-c", _FULL_DISK, str(llama / "build.yaml"), "--output", str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 2, done.stderr
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out" / "shards").iterdir()) == []


def test_reasoner_command_line(capsys):
    code, message = refused(reasoner_command.main, ["evaluat"], capsys)
    assert code == 2
    assert "{train,evaluate}" in message

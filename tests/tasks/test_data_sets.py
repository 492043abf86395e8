"""Each public data set: three made-up rows in its exact schema, read by the code that reads the real one."""

import json
import re
import shutil
import sys
from pathlib import Path

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError

from ace_learn.tasks import TaskConfig, build_task, sets
from ace_learn.tasks.data_set import find_data_set
from ace_learn.tasks.sets import data_set_names

DATA = Path(__file__).parent / "data"
OTHER_TASKS = {"execute_code": True}
FOUR = {"kind": "choice", "options": ["A", "B", "C", "D"]}
AIME = {"kind": "integer", "minimum": 0, "maximum": 999}


def fixture_task(name, **fields):
    allowed = OTHER_TASKS if name == "humaneval_plus" else {}
    return build_task(TaskConfig(name=name, path=DATA / name, **allowed, **fields))


def examples_by_question(name, **fields):
    examples = list(fixture_task(name, **fields).examples(3, seed=0))
    assert all(len(example.messages) == 1 and example.messages[0]["role"] == "user" for example in examples)
    return {example.messages[0]["content"].split("\n")[0]: example for example in examples}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gsm8k",
            {
                "Ina packs": ({"kind": "integer"}, "36", "gsm8k"),
                "A town of 1,400": ({"kind": "integer"}, "1650", "gsm8k"),
                "Olek owes": ({"kind": "integer"}, "-5", "gsm8k"),
            },
        ),
        (
            "math500",
            {
                "What is": ({"kind": "boxed", "equality": "math"}, "\\frac{3}{4}", "Prealgebra"),
                "Solve": ({"kind": "boxed", "equality": "math"}, "5 - y", "Algebra"),
                "Which": ({"kind": "boxed", "equality": "math"}, "i", "Precalculus"),
            },
        ),
        (
            "aime2024",
            {
                "Find the sum": (AIME, "325", "aime2024"),
                "Find the remainder": (AIME, "24", "aime2024"),
                "How many": (AIME, "0", "aime2024"),
            },
        ),
        (
            "aime2025",
            {
                "Find the number": (AIME, "64", "aime2025"),
                "Find $9": (AIME, "999", "aime2025"),
                "Find the last": (AIME, "1", "aime2025"),
            },
        ),
        (
            "mmlu",
            {
                "What is the identity": (FOUR, "B", "abstract_algebra"),
                "Which organ": (FOUR, "A", "anatomy"),
                "Who gains": (FOUR, "D", "econometrics"),
            },
        ),
        (
            "mmlu_pro",
            {
                "Which digit": ({"kind": "choice", "options": list("ABCDEFGHIJ")}, "J", "math"),
                "Which of these": ({"kind": "choice", "options": list("ABC")}, "B", "chemistry"),
                "What does": ({"kind": "choice", "options": list("ABCDE")}, "C", "physics"),
            },
        ),
        (
            "arc_challenge",
            {
                "Which is a source": (FOUR, "C", "arc_challenge"),
                "What do roots": (FOUR, "B", "arc_challenge"),
                "Which melts": ({"kind": "choice", "options": list("ABC")}, "A", "arc_challenge"),
            },
        ),
    ],
)
def test_rows_become_problems(name, expected):
    found = examples_by_question(name)
    assert len(found) == len(expected) == 3
    for start, (spec, gold, family) in expected.items():
        (example,) = [example for question, example in found.items() if question.startswith(start)]
        assert (example.contract.to_spec(), example.gold, example.family) == (spec, gold, family)
        assert example.messages[0]["content"].endswith("\n\n" + example.contract.instruction())
        assert example.correct(gold)
        assert not any(example.correct(wrong) for wrong in ("7", "E", "\\frac{1}{4}", None))


def test_options_are_lettered_lines():
    text = examples_by_question("mmlu")["Which organ pumps blood?"].messages[0]["content"]
    assert text.startswith("Which organ pumps blood?\n\nA) The heart\nB) The liver\nC) The lung\nD) The skin\n\n")


def test_gpqa_options_are_shuffled_by_the_question_alone(tmp_path):
    right = {"Which particle": "The photon", "Which gas": "Hydrogen", "Which molecule": "tRNA"}
    found = examples_by_question("gpqa_diamond")
    assert {example.family for example in found.values()} == {"Physics", "Chemistry", "Biology"}
    for start, answer in right.items():
        (example,) = [example for question, example in found.items() if question.startswith(start)]
        assert f"\n{example.gold}) {answer}\n" in example.messages[0]["content"]
    assert {example.gold for example in found.values()} != {"A"}
    copy = tmp_path / "copy"
    shutil.copytree(DATA / "gpqa_diamond", copy)
    header, *rows = (copy / "gpqa_diamond.csv").read_text().splitlines()
    (copy / "gpqa_diamond.csv").write_text("\n".join([header, *reversed(rows)]) + "\n")
    again = build_task(TaskConfig(name="gpqa_diamond", path=copy)).examples(3, seed=0)
    texts = {example.messages[0]["content"] for example in found.values()}
    assert {example.messages[0]["content"] for example in again} == texts


def test_gpqa_right_options_are_spread():
    example = find_data_set("gpqa_diamond").example
    from ace_learn.tasks.data_set import Row

    row = json.loads('{"Correct Answer": "w", "Incorrect Answer 1": "x", "Incorrect Answer 2": "y"}')
    row |= {"Incorrect Answer 3": "z", "High-level domain": "Physics"}
    golds = [example(Row(columns=row | {"Question": f"Question {i}?"}, where="here")).gold for i in range(400)]
    for letter in "ABCD":
        assert 60 <= golds.count(letter) <= 140  # 100 expected, 8.7 is one standard deviation


def test_humaneval_runs_the_tests_of_the_data_set():
    found = examples_by_question("humaneval_plus")
    (first, *_rest) = found
    assert first == "Complete this Python function. Give the whole function `double`, with the imports that it needs."
    assert len(found) == 3
    for example in found.values():
        assert example.contract.to_spec() == {"kind": "tag", "tag": "code"}
        assert example.contract.valid(example.gold)
        assert example.correct(example.gold)
        assert example.correct(f"```python\n{example.gold}\n```")
        assert not example.correct("pass")
        assert not example.correct(3)
    double = found[first]
    assert double.correct("def double(n):\n    return n + n")
    assert not double.correct("def double(n):\n    return n + 1")
    assert not double.correct("import sys\nsys.exit(0)")


def test_humaneval_remembers_an_answer(monkeypatch):
    from ace_learn.tasks.sets import humaneval_plus

    (example, *_rest) = examples_by_question("humaneval_plus").values()
    runs = []
    monkeypatch.setattr(humaneval_plus, "passes", lambda program: runs.append(program) or True)
    assert [example.correct("pass") for _ in range(3)] == [True] * 3
    assert len(runs) == 1


def test_code_is_run_only_when_the_recipe_allows_it():
    config = TaskConfig(name="humaneval_plus", path=DATA / "humaneval_plus")
    with pytest.raises(ValueError, match=r"code that the model wrote.*--task\.execute_code true"):
        build_task(config)
    with pytest.raises(ValueError, match="'gsm8k' does not read 'execute_code'"):
        build_task(TaskConfig(name="gsm8k", path=DATA / "gsm8k", execute_code=True))


def test_order_and_other_splits():
    orders = [[example.gold for example in fixture_task("gsm8k").examples(3, seed)] for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 1
    assert next(fixture_task("gsm8k", split="test").examples(1, 0)).gold == "36"
    assert len(list(fixture_task("arc_challenge", split="train+validation+test").examples(5, 0))) == 5
    (example,) = fixture_task("gsm8k", instruct=False, split="test").examples(1, 0)
    assert example.messages[0]["content"] == "Ina packs 3 boxes with 12 pears each. How many pears is that?"
    by_hub = build_task(TaskConfig(name="gsm8k", hub=str(DATA / "gsm8k"), split="test"))
    assert len(list(by_hub.examples(1, 0))) == 1
    with pytest.raises(ValueError, match="gsm8k has 3 distinct problems in 3 rows, but 4 are wanted"):
        fixture_task("gsm8k").examples(4, 0)


def test_every_data_set_has_a_fixture_with_its_columns():
    assert {path.name for path in DATA.iterdir()} == set(data_set_names())
    for name in data_set_names():
        assert fixture_task(name).name == name


def test_the_page_shows_a_data_set_in_one_file(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "boolq.py").write_text(module)
    monkeypatch.setattr(sets, "__path__", [*sets.__path__, str(tmp_path)])
    rows = [{"question": "is water wet", "answer": True, "passage": "Water wets."}]
    rows += [{"question": "is sand wet", "answer": False, "passage": "Sand is dry."}]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        examples = list(build_task(TaskConfig(name="boolq", path=tmp_path / "copy")).examples(2, seed=0))
    finally:
        sys.modules.pop("ace_learn.tasks.sets.boolq", None)
    assert {example.messages[0]["content"].split("\n")[2]: example.gold for example in examples} == {
        "is water wet?": "yes",
        "is sand wet?": "no",
    }
    with pytest.raises(ValueError, match=r"unknown task 'boolq2'; known: .*boolq"):
        build_task(TaskConfig(name="boolq2"))


def test_the_page_lists_every_data_set():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    for name in data_set_names():
        data_set = find_data_set(name)
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"`{data_set.hub}`" in line
        assert f"`{data_set.split}`" in line
        assert (data_set.subset or "") in line
        assert ("gated" in line) == data_set.gated


def copy_with(tmp_path, name, file, change):
    """A copy of a fixture whose first row is changed."""
    shutil.copytree(DATA / name, tmp_path / name)
    path = tmp_path / name / file
    first, *rest = path.read_text().splitlines()
    row = json.loads(first)
    change(row)
    path.write_text("\n".join([json.dumps(row), *rest]) + "\n")
    return build_task(TaskConfig(name=name, path=tmp_path / name))


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("gsm8k", "main/train-00000-of-00001.jsonl", {"answer": "36"}, r"gsm8k, row 1: column 'answer' holds '36'"),
        ("gsm8k", "main/train-00000-of-00001.jsonl", {"answer": "x\n#### 3.5"}, "row 1: the gold answer '3.5'"),
        ("gsm8k", "main/train-00000-of-00001.jsonl", {"question": " "}, "column 'question' holds ' '"),
        ("aime2025", "test.jsonl", {"answer": "1000"}, "row 1: the gold answer '1000'"),
        ("aime2025", "test.jsonl", {"answer": "many"}, "'many', but it should hold an integer"),
        ("mmlu", "all/test-00000-of-00001.jsonl", {"answer": 4}, "option 4 of 4 cannot be the right one"),
        ("mmlu", "all/test-00000-of-00001.jsonl", {"choices": []}, "should hold a list of texts"),
        (
            "arc_challenge",
            "ARC-Challenge/test-00000-of-00001.jsonl",
            {"answerKey": "E"},
            "the answer key 'E' among them",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, name, file, change, message):
    task = copy_with(tmp_path, name, file, lambda row: row.update(change))
    with pytest.raises(ValueError, match=message):
        task.examples(3, seed=0)


def test_missing_columns_are_named(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"question": "q", "reply": "#### 1"}) + "\n")
    with pytest.raises(ValueError, match=r"gsm8k has no column 'answer'; it has question, reply.*openai/gsm8k"):
        build_task(TaskConfig(name="gsm8k", path=folder, subset="default"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": Path("nowhere")}, r"nowhere is no folder; --task\.path takes one laid out like openai/gsm8k"),
        ({"path": DATA / "gsm8k", "hub": "me/gsm8k"}, "either path"),
        ({"path": DATA / "gsm8k", "split": "dev"}, r"split 'dev'.*choose another with --task\.split"),
        ({"path": DATA / "gsm8k", "subset": "other"}, r"'other'.*--task\.subset"),
        ({"path": DATA / "gsm8k", "gold_column": "answer"}, "does not read 'gold_column'; it reads path, hub"),
        ({}, r"'openai/gsm8k'.*check the network.*--task\.path FOLDER"),
    ],
)
def test_what_cannot_be_loaded_says_what_to_do(fields, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        build_task(TaskConfig(name="gsm8k", **fields))


def test_gated_and_missing_data_sets_say_what_to_do(monkeypatch):
    import ace_learn.tasks.loading as loading

    def refuse(name, *args, **kwargs):
        raise DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(loading, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa.*hf auth"
    ):
        build_task(TaskConfig(name="gpqa_diamond"))
    with pytest.raises(ValueError, match=r"check the name, or give a local copy.*--task\.path FOLDER"):
        build_task(TaskConfig(name="gpqa_diamond", hub="me/gpqa"))
    with pytest.raises(ValueError, match=r"check the name.*--task\.hub FOLDER"):
        build_task(TaskConfig(name="hub", hub="me/mine", contract={"kind": "integer"}))


def test_a_full_disk_is_not_taken_for_a_missing_data_set(monkeypatch):
    import ace_learn.tasks.loading as loading

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "load_dataset", fail)
    with pytest.raises(OSError, match="No space left"):
        build_task(TaskConfig(name="gsm8k"))


def test_offline_is_what_the_tests_are():
    assert datasets.config.HF_HUB_OFFLINE

import json

import pytest

from ace_learn.contracts import Contract
from ace_learn.tasks import TaskConfig, build_task
from ace_learn.tasks.base import read_gold

INTEGER = {"kind": "integer"}


def table(tmp_path, rows, name="data.jsonl", **fields):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"contract": INTEGER, "gold_column": "gold"} | fields
    return build_task(TaskConfig(name="table", path=path, **fields))


ROWS = [{"prompt": f"What is {i} + 1?", "gold": i + 1} for i in range(20)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_each_kind_of_file_gives_the_same_examples(tmp_path, suffix):
    from datasets import Dataset

    dataset = Dataset.from_list(ROWS)
    path = tmp_path / f"data.{suffix}"
    if suffix == "csv":
        dataset.to_csv(path)
    elif suffix == "parquet":
        dataset.to_parquet(path)
    else:
        dataset.to_json(path)
    task = build_task(TaskConfig(name="table", path=path, contract=INTEGER, gold_column="gold"))
    examples = list(task.examples(20, seed=0))
    expected = {f"What is {i} + 1?": str(i + 1) for i in range(20)}
    sentence = "\n\n" + Contract.from_spec(INTEGER).instruction()
    assert {e.messages[0]["content"].removesuffix(sentence): str(e.gold) for e in examples} == expected


def test_order_depends_on_the_seed_alone(tmp_path):
    task = table(tmp_path, ROWS)
    orders = [[e.gold for e in task.examples(n, seed)] for n, seed in ((20, 0), (20, 0), (20, 1), (5, 0))]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == orders[0][:5]


def test_same_prompt_twice_is_one_problem(tmp_path):
    task = table(tmp_path, ROWS + ROWS[:7])
    assert len(list(task.examples(20, seed=0))) == 20
    with pytest.raises(ValueError, match=r"data.jsonl has 20 distinct problems in 27 rows, but 21 are wanted"):
        task.examples(21, seed=0)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"must be >= 1, not {count}"):
            task.examples(count, seed=0)


def test_contract_column_with_mixed_specs_and_golds(tmp_path):
    # In a column of objects every row has the keys of all rows; absent ones must not reach the contract.
    specs = [INTEGER, {"kind": "choice", "options": ["A", "B"]}]
    rows = [{"prompt": str(i), "gold": ["7", "B"][i % 2], "contract": specs[i % 2]} for i in range(4)]
    examples = list(table(tmp_path, rows, contract=None, contract_column="contract").examples(4, seed=0))
    assert sorted((e.contract.kind, e.gold) for e in examples) == [("choice", "B")] * 2 + [("integer", "7")] * 2
    texts = [row | {"contract": json.dumps(row["contract"])} for row in rows]
    task = table(tmp_path, texts, name="texts.jsonl", contract=None, contract_column="contract")
    assert [e.contract for e in task.examples(4, seed=0)] == [e.contract for e in examples]


def test_chats_and_families(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    (example,) = table(
        tmp_path, [{"chat": chat, "gold": None, "topic": "sums"}], messages_column="chat", family_column="topic"
    ).examples(1, seed=0)
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert example.messages[0]["content"] == "Be short."
    assert example.messages[1]["content"].startswith("2 + 2?\n\n")
    assert (example.gold, example.family) == (None, "sums")


def test_no_gold_column_means_no_gold(tmp_path):
    examples = table(tmp_path, ROWS, gold_column=None, instruct=False).examples(20, seed=0)
    assert {example.gold for example in examples} == {None}


def test_json_gold(tmp_path):
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    rows = [{"prompt": "p", "gold": {"answer": 3}}, {"prompt": "q", "gold": {"answer": 4}}]
    task = table(tmp_path, rows, contract={"kind": "json", "schema": schema})
    assert sorted(e.gold["answer"] for e in task.examples(2, seed=0)) == [3, 4]


def test_hub_layout_in_a_local_folder(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = TaskConfig(name="hub", hub=str(folder), contract=INTEGER, gold_column="gold")
    assert len(list(build_task(config).examples(20, seed=0))) == 20
    with pytest.raises(ValueError, match="validation"):
        build_task(TaskConfig(name="hub", hub=str(folder), split="validation", contract=INTEGER))
    with pytest.raises((ValueError, OSError), match="nobody"):
        build_task(TaskConfig(name="hub", hub=str(tmp_path / "nobody"), contract=INTEGER))


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, "data.jsonl is empty"),
        ([{"question": "q", "gold": 1}], {}, "no column 'prompt'; it has question, gold"),
        ([{"prompt": "q"}], {}, "no column 'gold'; it has prompt"),
        ([{"prompt": "q", "gold": 1}], {"messages_column": "chat"}, "no column 'chat'"),
        ([{"prompt": "q", "gold": 1}], {"contract": None}, "give either contract"),
        ([{"prompt": "q", "gold": 1, "c": "{}"}], {"contract_column": "c"}, "give either contract"),
        ([{"prompt": "q", "gold": 1}], {"prompt_column": None}, "give prompt_column or messages_column"),
        ([{"prompt": "q", "gold": 1}], {"families": ("chain",)}, "does not read 'families'"),
        ([{"prompt": "q", "gold": 1}], {"contract": {"kind": "poem"}}, "unknown contract kind 'poem'"),
    ],
)
def test_bad_tables_are_refused_at_once(tmp_path, rows, fields, message):
    with pytest.raises(ValueError, match=message):
        table(tmp_path, rows, **fields)


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"prompt": None, "gold": 1}, {}, "row 2: column 'prompt' holds no text but None"),
        ({"prompt": "  ", "gold": 1}, {}, "row 2: column 'prompt' holds no text"),
        ({"prompt": "q", "gold": 2.5}, {}, "row 2: the gold answer 2.5 is no legal answer of the contract"),
        ({"prompt": "q", "gold": 1, "c": '{"kind": "poem"}'}, {"contract_column": "c"}, "row 2: unknown contract kind"),
        ({"prompt": "q", "gold": 1, "c": "{"}, {"contract_column": "c"}, "row 2"),
        ({"prompt": "q", "gold": 1, "c": None}, {"contract_column": "c"}, "row 2: column 'c' holds no contract"),
        ({"chat": [], "gold": 1}, {"messages_column": "chat"}, "row 2: column 'chat' holds no chat"),
        (
            {"chat": [{"role": "assistant", "content": "a"}], "gold": 1},
            {"messages_column": "chat"},
            "ends with a user turn",
        ),
        ({"chat": [{"role": "user", "content": None}], "gold": 1}, {"messages_column": "chat"}, "holds no chat"),
        ({"chat": [{"role": "robot", "content": "a"}], "gold": 1}, {"messages_column": "chat"}, "holds no chat"),
        ({"chat": None, "gold": 1}, {"messages_column": "chat"}, "holds no chat"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, fields, message):
    good = {
        "prompt": "What is 1 + 1?",
        "gold": 2,
        "c": '{"kind": "integer"}',
        "chat": [{"role": "user", "content": "1 + 1?"}],
    }
    fields = {"contract": None if "contract_column" in fields else INTEGER} | fields
    task = table(tmp_path, [good, row], **fields)
    with pytest.raises(ValueError, match=message):
        task.examples(2, seed=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [("bad.jsonl", '{"prompt": "a"\n{"'), ("bad.parquet", "not parquet"), ("bad.json", "\x00\x01"), ("bad.csv", "")],
)
def test_files_that_cannot_be_read(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        build_task(TaskConfig(name="table", path=tmp_path / name, contract=INTEGER))


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        build_task(TaskConfig(name="table", path=tmp_path / "absent.jsonl", contract=INTEGER))
    (tmp_path / "data.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"unknown kind of file '.xlsx'; known: .jsonl"):
        build_task(TaskConfig(name="table", path=tmp_path / "data.xlsx", contract=INTEGER))
    with pytest.raises(ValueError, match=r"needs --task\.path"):
        build_task(TaskConfig(name="table", contract=INTEGER))
    with pytest.raises(ValueError, match="unknown task 'tabel'; known: reasoner, table, hub"):
        build_task(TaskConfig(name="tabel"))


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        (INTEGER, 42, 42),
        (INTEGER, 42.0, 42),
        ({"kind": "boxed"}, 42, "42"),
        (INTEGER, " 42 ", "42"),
        (INTEGER, "She has 3 + 4 = 7 eggs.\n#### 1,204", "1204"),
        ({"kind": "choice", "options": ["A", "B"]}, "B", "B"),
        ({"kind": "json", "schema": {"type": "object"}}, '{"a": 1}', {"a": 1}),
        (INTEGER, None, None),
    ],
)
def test_gold_in_the_contracts_terms(spec, value, expected):
    assert read_gold(Contract.from_spec(spec), value, where="here") == expected

import json
import subprocess
import sys

import pytest

from ace_learn.contracts.__main__ import main
from ace_learn.contracts.check import check_file

RIGHT = {"id": "a", "contract": {"kind": "boxed"}, "text": "\\boxed{1}", "answer": "1", "commit_end": 9}


def write(path, *cases):
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def test_right_cases_give_nothing(tmp_path, capsys):
    path = write(tmp_path / "cases.jsonl", RIGHT)
    assert check_file(path) == []
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == "1 of 1 cases right\n"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"answer": "2"}, 'a: expected "2" at 9, got "1" at 9'),
        ({"commit_end": 8}, 'a: expected "1" at 8, got "1" at 9'),
        ({"answer": None, "commit_end": None}, 'a: expected null, got "1" at 9'),
        ({"answer": 1}, 'a: expected 1 at 9, got "1" at 9'),
        ({"text": "\\boxed{1"}, 'a: expected "1" at 9, got null'),
    ],
)
def test_a_wrong_case_prints_id_expected_and_got(tmp_path, capsys, change, line):
    path = write(tmp_path / "cases.jsonl", RIGHT, RIGHT | change)
    assert [str(failure) for failure in check_file(path)] == [line]
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out == f"{line}\n1 of 2 cases right\n"


def test_cases_of_unknown_kinds_are_failures_and_the_others_are_run(tmp_path, capsys):
    unknown = [RIGHT | {"id": name, "contract": {"kind": kind}} for name, kind in (("p", "verse"), ("q", "verse"))]
    path = write(tmp_path / "cases.jsonl", *unknown, RIGHT, RIGHT | {"id": "b", "answer": "2"}, RIGHT)
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "p: not checked, unknown contract kind 'verse'",
        "q: not checked, unknown contract kind 'verse'",
        'b: expected "2" at 9, got "1" at 9',
        "2 of 5 cases right; not checked, for their kinds are unknown: verse (2)",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense\n", ":1: no JSON"),
        ("[]\n", "must be a JSON object"),
        ('{"id": "a"}\n', "needs the strings id and text"),
        (json.dumps(RIGHT | {"commit_end": None}), "null together with answer"),
        (json.dumps(RIGHT | {"contract": {"kind": "integer", "min": 3}}), "case 'a': unknown contract key 'min'"),
        (json.dumps(RIGHT | {"contract": {}}), "case 'a': contract key 'kind' is missing"),
    ],
)
def test_a_bad_file_is_named(tmp_path, capsys, text, said):
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_the_package_runs_as_a_module_and_imports_no_torch(tmp_path):
    path = write(tmp_path / "cases.jsonl", RIGHT)
    run = subprocess.run(
        [sys.executable, "-m", "ace_learn.contracts", "check", path], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "1 of 1 cases right\n")
    code = "import sys, ace_learn.contracts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

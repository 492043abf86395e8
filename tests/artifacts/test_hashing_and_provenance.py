"""Hashes and the provenance record."""

import subprocess
import sys
from pathlib import Path

import pytest

from ace_learn.artifacts import (
    ProvenanceRecorder,
    git_state,
    read_fields,
    sha256_file,
    sha256_folder,
    sha256_json,
)

_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_sha256_of_files_and_json(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert sha256_file(tmp_path / "empty") == _EMPTY
    assert sha256_json({"b": None, "a": [1, 2]}) == sha256_json({"a": [1, 2], "b": None})
    assert sha256_json({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_sha256_folder_sees_names_and_contents_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x").write_text("x")
    before = sha256_folder(tmp_path / "a")
    assert before == sha256_folder(tmp_path / "b")
    for name in ("provenance.json", ".writer.lock", "x.tmp-1"):
        (tmp_path / "a" / name).write_text("volatile")
    (tmp_path / "a" / "logs").mkdir()
    (tmp_path / "a" / "logs" / "events").write_text("volatile")
    assert sha256_folder(tmp_path / "a") == before
    (tmp_path / "a" / "policy.json").write_text("{}")
    assert sha256_folder(tmp_path / "a") != before
    assert sha256_folder(tmp_path / "a", exclude=["policy.json"]) == before
    (tmp_path / "b" / "sub" / "x").rename(tmp_path / "b" / "sub" / "y")
    assert sha256_folder(tmp_path / "b") != before
    with pytest.raises(NotADirectoryError):
        sha256_folder(tmp_path / "missing")


def test_provenance_record(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").write_text("x")
    with ProvenanceRecorder({"file": data / "x", "folder": data}) as recorder:
        recorder.write(tmp_path)
    fields = read_fields(tmp_path / "provenance.json")
    assert fields.fields("inputs").text("file") == sha256_file(data / "x")
    assert fields.fields("inputs").text("folder") == sha256_folder(data)
    assert fields.fields("versions").text("python") == sys.version.split()[0]
    assert fields.number("wall_seconds") >= 0
    assert fields.integer("peak_memory_bytes") > 1e6
    assert "pytest" in fields.text("command")


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) == (None, None, None)
    git("init", "-q")
    file = tmp_path / "ace_learn" / "__init__.py"
    file.parent.mkdir()
    file.touch()
    assert git_state(tmp_path) == (None, None, None)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = git_state(tmp_path)
    assert clean.sha is not None
    assert (len(clean.sha), clean.dirty, clean.diff_sha256) == (40, False, None)
    file.write_text("x = 1\n")
    changed = git_state(tmp_path)
    assert (changed.sha, changed.dirty) == (clean.sha, True)
    assert changed.diff_sha256 is not None


def test_import_is_light() -> None:
    program = "import sys, ace_learn.artifacts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

"""Atomic writes: nothing half is ever visible, whatever kills the writer."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ace_learn.artifacts import (
    atomic_file,
    atomic_folder,
    clean_stale,
    is_temporary,
    publish,
    read_json,
    write_json,
    write_text,
)


def _full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_write_json_round_trip_and_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": [1, 2.5, None, "é"]})
    assert read_json(path) == {"x": [1, 2.5, None, "é"]}
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_write_json_keeps_the_old_file_on_a_bad_value(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match=r"b\.json as JSON"):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == {"x": 1}


def test_write_text_on_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(path, "new")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lines.jsonl"
    with atomic_file(path) as file:
        file.write("é\n")
        file.flush()
        (temporary,) = path.parent.iterdir()
        assert is_temporary(temporary)
        assert temporary.read_text(encoding="utf-8") == "é\n"
        file.write("b\n")
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text(encoding="utf-8") == "é\nb\n"


def test_atomic_file_leaves_nothing_behind_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "lines.jsonl"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "shards" / "00000"
    with atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("x")
        assert not target.exists()
        assert is_temporary(folder)
    assert (target / "sub" / "x").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]


def test_atomic_folder_on_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "x").write_text("x")
            raise KeyError("boom")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> None:
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "x").write_text("x")
            monkeypatch.setattr(os, "fsync", _full_disk)

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_refuses_an_existing_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("kept")
    with pytest.raises(ValueError, match="exists already"), atomic_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "a" / "x").read_text() == "kept"


def test_kill_in_the_middle_leaves_nothing_visible(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from ace_learn.artifacts import atomic_folder\n"
        "with atomic_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('half')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    target = tmp_path / "shard"
    process = subprocess.Popen([sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    assert is_temporary(left)
    shutil.copytree(left, tmp_path / "another.tmp-12")
    with atomic_folder(target) as folder:
        (folder / "whole").write_text("whole")
    assert [entry.name for entry in target.iterdir()] == ["whole"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["another.tmp-12", "shard"]
    clean_stale(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["shard"]


def test_what_a_live_writer_writes_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "shard[1]"
    (tmp_path / "shard[1].tmp-dead").mkdir()
    with atomic_folder(target) as first:
        assert not (tmp_path / "shard[1].tmp-dead").exists()
        (first / "a").write_text("a")
        with pytest.raises(RuntimeError), atomic_folder(target):
            raise RuntimeError
        assert (first / "a").read_text() == "a"
    assert [entry.name for entry in tmp_path.iterdir()] == ["shard[1]"]


def test_clean_stale_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    (tmp_path / "x.tmp-12").mkdir()
    (tmp_path / "y.tmp-34").write_text("y")
    clean_stale(tmp_path)
    clean_stale(tmp_path / "missing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_publish_moves_the_marker_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("config.json", "model", "metrics"):
        (source / name).write_text(name)
    order: list[str] = []
    replace = Path.replace

    def watched(self: Path, to: Path) -> Path:
        order.append(self.name)
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", watched)
    publish(source, target, last="config.json")
    assert order == ["metrics", "model", "config.json"]
    assert sorted(entry.name for entry in target.iterdir()) == ["config.json", "metrics", "model"]

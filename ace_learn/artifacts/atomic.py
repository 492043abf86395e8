"""Atomic writes: a reader sees the old state or the new one, never a half.

Everything is written under a temporary name beside its target, flushed to the disk and renamed. A process that is
killed leaves at most a temporary name, which readers skip (`is_temporary`) and the next writer removes (`clean_stale`,
or `atomic_folder` of the same folder).
"""

import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ace_learn.json_type import JSON

_MARK = ".tmp-"


def is_temporary(path: Path) -> bool:
    """Whether a path is the temporary name of an unfinished write."""
    return _MARK in path.name


def write_text(path: Path, text: str) -> None:
    """Writes a text file (UTF-8) atomically; parent folders are made.

    Raises:
        OSError: The disk is full or the path cannot be written; then nothing has changed.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically; parent folders are made.

    Raises:
        OSError: The disk is full or the path cannot be written; then nothing has changed.
    """
    with _replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: JSON) -> None:
    """Writes a JSON file atomically: UTF-8, indented, keys in the given order.

    Raises:
        ValueError: The value holds NaN or infinity, which JSON has not, or something that is no JSON.
        OSError: The disk is full or the path cannot be written; then nothing has changed.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot write {path} as JSON: {error}") from error
    write_text(path, text + "\n")


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8), written bit by bit, that appears under its name only when the block has ended well.

    Args:
        path: The file to make; parent folders are made, and a file of that name is replaced.

    Yields:
        A temporary file beside it to write into.

    Raises:
        OSError: The disk is full or the path cannot be written; then the temporary file is gone again.
    """
    with _replacing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Name of a file that takes the place of `path` when the block has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name only when the block has ended without an error.

    What killed writers of the same folder have left beside it is removed; a live one is recognised by its lock.

    Args:
        path: The folder to make. It must not exist yet (an empty folder is replaced).

    Yields:
        A temporary folder beside it to write into.

    Raises:
        ValueError: The folder exists and is not empty.
        OSError: The disk is full or the path cannot be written; then the temporary folder is gone again.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; remove it or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    _remove_abandoned(path)
    temporary.mkdir()
    held = os.open(temporary, os.O_RDONLY)
    try:
        with suppress(OSError):  # where the file system has no locks, nothing is taken for abandoned
            fcntl.flock(held, fcntl.LOCK_SH)  # a sign of life; it ends with the process, however that ends
        yield temporary
        sync_tree(temporary)
        temporary.rename(path)
    finally:
        os.close(held)
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(path.parent)


def publish(temporary: Path, folder: Path, *, last: str) -> None:
    """Moves files from one folder to another on the same disk, one by one, `last` at the end.

    For an artifact that shares its folder with other things (logs, checkpoints): its readers look for the file `last`,
    so the artifact appears whole or not at all.

    Args:
        temporary: The folder that holds the finished files; it is empty afterwards.
        folder: The existing folder that gets them; files of the same name are replaced.
        last: Name of the file without which the artifact does not count.

    Raises:
        OSError: The disk is full or a file cannot be moved.
    """
    sync_tree(temporary)
    names = sorted((entry.name for entry in temporary.iterdir()), key=lambda name: (name == last, name))
    assert last in names, f"{last} is not among {names}"
    for name in names[:-1]:
        (temporary / name).replace(folder / name)
    _sync(folder)
    (temporary / last).replace(folder / last)
    _sync(folder)


def clean_stale(parent: Path) -> None:
    """Removes what killed writers left in a folder.

    Call it only while holding the writer lock that covers the folder: a live writer's temporary names look the same.
    """
    if not parent.is_dir():
        return
    for entry in sorted(parent.iterdir()):
        if not is_temporary(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flushes every file and folder below a folder to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _remove_abandoned(path: Path) -> None:
    """Removes the temporary folders of `atomic_folder(path)` whose writers are dead."""
    for folder in path.parent.glob(f"{glob.escape(path.name + _MARK)}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its writer lives, or this file system cannot tell
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(held)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}{_MARK}{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

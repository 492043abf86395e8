"""One writer per artifact folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_LOCK_NAME = ".writer.lock"
_PID_NAME = ".writer.pid"

#: Names that `writer_lock` leaves in a folder.
LOCK_NAMES = frozenset({_LOCK_NAME, _PID_NAME})


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Holds the right to write into a folder, which is made where it is missing.

    The operating system frees the lock when the process ends, however it ends. The lock file itself stays, since
    removing it would let two writers lock two files of the same name.

    Raises:
        ValueError: Another writer, in this process or another one, holds the folder.
        OSError: The folder cannot be made or locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_NAME, timeout=0)
    pid_file = folder / _PID_NAME
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{folder} is being written by another process (pid {_holder(pid_file)}); "
            "wait until it has ended, or choose another folder"
        ) from error
    try:
        pid_file.write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        pid_file.unlink(missing_ok=True)
        lock.release()


def _holder(pid_file: Path) -> str:
    try:
        return pid_file.read_text(encoding="utf-8").strip() or "unknown"
    except OSError:
        return "unknown"

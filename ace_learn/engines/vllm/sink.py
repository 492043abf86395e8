"""A JSONL file of audit records. It holds users' answers: off unless configured, readable by its owner alone."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

from ace_learn.contracts import JSON

_logger = logging.getLogger(__name__)

_WAITING = 10_000
"""Records that may wait to be written; more are dropped, and counted."""
_BATCH = 256
_PATIENCE_S = 5.0
MODE = 0o600


class AuditSink:
    """Appends records to a file in a thread of its own, so that no request waits for the disk.

    At `max_bytes` the file becomes `NAME.1`, that one `NAME.2`, and so on; `num_files` are kept, the current one
    included. Several processes may write to one file. What cannot be written is dropped and counted, and logged once.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, num_files: int, on_error: Callable[[int], None] = lambda count: None
    ) -> None:
        """Prepares a sink; the thread starts with the first record.

        Args:
            path: The current file; its folder is made if need be.
            max_bytes: Size at which the file is rotated.
            num_files: Files kept, at least 1.
            on_error: Told how many records were lost.
        """
        self.path, self._max_bytes, self._num_files = path, max_bytes, num_files
        self._on_error = on_error
        self._lock = FileLock(path.with_name(f"{path.name}.lock"), mode=MODE)
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._logged = False

    def write(self, record: Mapping[str, JSON]) -> None:
        """Hands a record over; never waits and never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ace_learn audit log", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        line = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._lose(1, "the disk does not keep up")

    def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=_PATIENCE_S)
        except queue.Full:
            return
        self._thread.join(_PATIENCE_S)
        atexit.unregister(self.close)
        self._thread = None

    def _run(self) -> None:
        going = True
        while going:
            lines = [self._queue.get()]
            while len(lines) < _BATCH and not self._queue.empty():
                lines.append(self._queue.get())
            going = None not in lines
            batch = [line for line in lines if line is not None]
            try:
                self._append(batch)
            except OSError as error:
                self._lose(len(batch), str(error))

    def _append(self, lines: list[bytes]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            file = self._open()
            try:
                size = os.fstat(file).st_size
                for line in lines:
                    if size and size + len(line) > self._max_bytes:
                        os.close(file)
                        self._rotate()
                        file, size = self._open(), 0
                    size += len(line)
                    _write_all(file, line)
            finally:
                os.close(file)

    def _open(self) -> int:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        os.fchmod(file, MODE)  # a file that was there already
        return file

    def _rotate(self) -> None:
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{i}") for i in range(1, self._num_files))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                newer.rename(older)

    def _lose(self, count: int, why: str) -> None:
        self._on_error(count)
        if not self._logged:
            self._logged = True
            _logger.error("audit records are lost: cannot write to %s: %s (logged once)", self.path, why)


def _write_all(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]

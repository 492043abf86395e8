"""Mathematical equality of LaTeX answers, by math-verify in a process of its own.

The library's own time limit is an alarm signal, which fails off the main thread, and sympy may take for ever on a
hostile expression. So a child process does the work, and is killed when an answer takes too long.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

SECONDS = 5.0
"""A comparison that takes more processor time counts as unequal."""
MEMORY = 4 << 30
"""One that takes more bytes does as well."""
PATIENCE_SECONDS = 300.0
"""A worker that has neither replied nor used up its processor time by then hangs."""
START_SECONDS = 120.0
"""Importing sympy takes seconds on a busy machine."""
MAX_EXPRESSION = 512
"""Longer expressions are not compared, and count as unequal."""

_WORKER = Path(__file__).with_name("maths_worker.py")


def require() -> None:
    """Checks that the library is there.

    Raises:
        ValueError: It is not.
    """
    if find_spec("math_verify") is None:
        raise ValueError(
            "mathematical equality needs math-verify: pip install 'ace-learn[math]', or leave out \"equality\""
        )


@lru_cache(maxsize=1 << 16)
def equivalent(a: str, b: str) -> bool:
    """Whether two LaTeX expressions have the same value.

    False as well where one cannot be read, is longer than `MAX_EXPRESSION`, or the comparison takes more than `SECONDS`
    or `MEMORY`.
    """
    if max(len(a), len(b)) > MAX_EXPRESSION:
        return False
    return _WORKERS.ask(a, b)


class _Workers:
    """One child per process and thread-safe; a fork gets a child of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        atexit.register(self._close)

    def ask(self, a: str, b: str) -> bool:
        with self._lock:
            process = self._running()
            assert process.stdin is not None, "opened with a pipe"
            process.stdin.write(json.dumps([a, b]) + "\n")
            process.stdin.flush()
            reply = self._reply(process, PATIENCE_SECONDS)
            if not reply:  # it died of this expression
                self._stop(process)
            if reply is None:
                raise RuntimeError(f"math-verify has not replied within {PATIENCE_SECONDS:g} s on {a!r} and {b!r}")
            return reply == "true\n"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            [sys.executable, str(_WORKER), str(SECONDS), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._reply(process, START_SECONDS) != "ready\n":
            self._stop(process)
            raise RuntimeError(f"math-verify did not start; see what `{sys.executable} {_WORKER} 5 4294967296` says")
        self._process, self._owner = process, os.getpid()
        return process

    def _reply(self, process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line, "" if the child has ended, None if nothing comes in time; a line is short and comes whole."""
        assert process.stdout is not None, "opened with a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(seconds) else None

    def _close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._stop(self._process)

    def _stop(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()
        self._process = None


_WORKERS = _Workers()

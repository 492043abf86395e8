"""A vLLM server in a process of its own, on a free port of this machine, for as long as a block runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ace_learn.engines.vllm.command import HOST_VARIABLE, PORT_VARIABLE, ServeConfig, server_command

_START_S = 600.0
_STOP_S = 60.0
_LOG_TAIL = 2000
_CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process: two that poll take each other's core
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults for tiny models on a CPU; what the environment says already is kept."""


@contextmanager
def running_server(config: ServeConfig, log: Path) -> Iterator[str]:
    """Starts `python -m ace_learn.serve`'s command and waits until it answers; gives its base URL.

    Args:
        config: The server; its address is chosen here.
        log: File that gets its output.

    Raises:
        ValueError: It does not start; the last lines of its output are in the message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**_CPU_ENVIRONMENT, **os.environ, HOST_VARIABLE: "127.0.0.1", PORT_VARIABLE: port}
    command = server_command(replace(config, dry_run=False), environment)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _stop(process)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ValueError(f"the server did not start; the end of its output:\n{log.read_text()[-_LOG_TAIL:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_S)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(_STOP_S)

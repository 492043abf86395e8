"""Real servers: vLLM's API server in processes of its own, with the embedded reasoner, on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ace_learn.models.target import EMBEDDED, TargetConfig, load_target
from ace_learn.reasoner import weights_path
from ace_learn.tasks import TaskConfig, build_task, render_prompt
from ace_learn.testing.vllm.heads import write_test_head

ROOT = Path(__file__).parents[3]
KEY = "test-key"
NAME = "reasoner"
START_S = 600
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_API_KEY": KEY,
}
ARGUMENTS = {
    "max_model_len": 640,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "served_model_name": NAME,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


class Server(NamedTuple):
    """A server that answers."""

    url: str
    log: Path

    def call(self, method, path, body=None, *, key=KEY, headers=()):
        """Status and body of a call by hand."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        for name, value in {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
            **dict(headers),
        }.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self, prefix):
        """Sample -> value, of the metrics whose names begin so."""
        lines = self.call("GET", "/metrics")[1].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(prefix)]
        return {name: float(value) for name, value in pairs}


@contextmanager
def running_server(command, folder, **environment):
    """Starts a server on a free port, and ends it with the block.

    Args:
        command: The process; `PORT` in it becomes the port, which is in ACE_LEARN_PORT as well.
        folder: Where it runs and logs.
        environment: Beside that of all servers here; None takes a variable away.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = {**os.environ, **ENVIRONMENT, "ACE_LEARN_PORT": port, "PYTHONPATH": str(ROOT), **environment}
    log = folder / f"log-{port}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [port if word == "PORT" else str(word) for word in command],
            cwd=folder,
            env={name: value for name, value in found.items() if value is not None},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait_for(server, process)
        yield server
    finally:
        _end(process)


def _wait_for(server, process):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if server.call("GET", "/health")[0] == 200:
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{server.log.read_text()[-4000:]}")


def _end(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                continue


def ours(settings, *, speculation="ngram"):
    """`python -m ace_learn.serve` with the reasoner."""
    drafter = {"kind": speculation, "draft_tokens": 4}
    if speculation == "draft_model":
        drafter["model"] = EMBEDDED
    return [
        sys.executable, "-m", "ace_learn.serve", "--target.model", EMBEDDED, "--target.dtype", "float32",
        "--settings", json.dumps(settings), "--drafter", json.dumps(drafter), "--vllm", json.dumps(ARGUMENTS),
    ]  # fmt: skip


def stock():
    """The same server without a word of ours."""
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", weights_path(), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", "PORT", "--max-model-len", ARGUMENTS["max_model_len"], "--max-num-seqs",
        ARGUMENTS["max_num_seqs"], "--max-num-batched-tokens", ARGUMENTS["max_num_batched_tokens"],
        "--enforce-eager", "--served-model-name", NAME, "--speculative-config", json.dumps(NGRAM),
    ]  # fmt: skip


def examples(count, seed=77):
    """Problems of the reasoner's own."""
    return list(build_task(TaskConfig()).examples(count, seed))


def write_head(folder, count=24):
    """A head for the reasoner under which about half of these problems exit early."""
    from ace_learn.engines.requests import Request

    target = load_target(TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"))
    requests = [
        Request(
            key=key,
            prompt_ids=tuple(render_prompt(target.tokenizer, example.messages, thinking=True, markers=target.markers)),
            max_new_tokens=400,
        )
        for key, example in enumerate(examples(count))
    ]
    return write_test_head(folder, target, requests)

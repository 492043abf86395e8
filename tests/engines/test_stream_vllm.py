"""A real server: vLLM on a CPU, with the embedded reasoner behind it."""

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from ace_learn.engines.server import ChatRequest, ServerConfig
from ace_learn.engines.server_metrics import read_quiet_state, read_state
from ace_learn.engines.stream import StreamClient
from ace_learn.reasoner import weights_path
from ace_learn.tasks import TaskConfig, build_task

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROBLEMS = 12
CAP = 480
ENDLESS_CAP = 900
START_S = 300


@pytest.fixture(scope="module", params=["content", "channel"])
def server(request, tmp_path_factory):
    """Base URL of a server that sends thinking in the answer's channel, or in one of its own."""
    folder = tmp_path_factory.mktemp("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights_path()), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "reasoner", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--dtype", "float32", "--enforce-eager",
        *(["--reasoning-parser", "deepseek_r1"] if request.param == "channel" else []),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _wait_for(url, process, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{log.read_text()[-3000:]}")


def examples():
    return list(build_task(TaskConfig()).examples(PROBLEMS, 77))


def run(base_url, work, **fields):
    defaults = {"count": "continuous_usage", "temperature": 0.0, "body": {"skip_special_tokens": False}}
    config = ServerConfig(base_url=base_url, **{**defaults, **fields})

    async def inside():
        async with StreamClient(config) as client:
            return await work(client)

    return asyncio.run(inside())


def requests(cap=CAP):
    return [
        ChatRequest(key=key, messages=example.messages, contract=example.contract, max_new_tokens=cap)
        for key, example in enumerate(examples())
    ]


async def ask_all(client, *, exits=True):
    outputs = [output async for output in client.ask_all(requests(), exits=exits)]
    return sorted(outputs, key=lambda output: output.key)


def test_the_server_stops_generating_at_the_commit(server, record_property):
    """The model is kept from ending by itself, so it would go on to the cap."""

    async def one_by_one(client):
        past, seen_running = [], 0.0
        for request in requests(ENDLESS_CAP):
            before = await read_quiet_state(server)
            asked = asyncio.ensure_future(client.ask(request))
            while not asked.done():
                seen_running = max(seen_running, (await read_state(server)).running)
                await asyncio.sleep(0.02)
            output = asked.result()
            after = await read_quiet_state(server)
            await asyncio.sleep(0.2)
            assert await read_state(server) == after
            assert after.running == 0
            if output.finish_reason == "contract":
                assert output.kept_tokens < ENDLESS_CAP - 100
                past.append(round(after.generated - before.generated) - output.kept_tokens)
        return past, seen_running

    past, seen_running = run(server, one_by_one, body={"skip_special_tokens": False, "ignore_eos": True})
    assert seen_running == 1
    assert len(past) >= PROBLEMS // 2
    record_property("tokens_past_commit", past)
    print(f"tokens past the commit: median {statistics.median(past):g}, max {max(past)} of {sorted(past)}")
    assert min(past) >= 0
    assert max(past) <= 16


def test_the_answers_are_those_of_a_plain_client(server):
    short = run(server, ask_all)
    long = run(server, lambda client: ask_all(client, exits=False))
    assert [output.answer for output in short] == [output.answer for output in long]
    assert all(one.tokens <= other.tokens for one, other in zip(short, long, strict=True))
    assert {output.counted_by for output in short} == {"usage"}
    correct = [example.correct(output.answer) for example, output in zip(examples(), short, strict=True)]
    assert sum(correct) >= 0.8 * PROBLEMS
    assert all(output.thinking and "<think>" not in output.text for output in short)


def test_chunks_by_token_ids_give_the_text_of_a_stream(server):
    streamed = run(server, ask_all, concurrency=1)
    chunked = run(server, ask_all, concurrency=1, chunk=64, count="token_ids")
    assert [output.text for output in chunked] == [output.text for output in streamed]
    assert [output.thinking for output in chunked] == [output.thinking for output in streamed]
    assert all(output.calls > 1 for output in chunked)
    assert all(0 <= output.tokens - output.kept_tokens < 64 for output in chunked)

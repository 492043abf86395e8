import asyncio
import time

import pytest

from ace_learn.contracts import Contract
from ace_learn.engines.server import ChatRequest, ServerConfig
from ace_learn.engines.stream import StreamClient
from ace_learn.tasks.base import user_message
from tests.helpers.loopback import PROMPT_ID, Loopback, tokens_of

BOXED = Contract.from_spec({"kind": "boxed"})
THOUGHT = tokens_of("<think>\nIs it \\boxed{6}? No.\n\nIt is 7.\n</think>")
ANSWER = tokens_of("\n\nThe answer is \\boxed{7}")
TAIL = tokens_of(". Let me say that again: the answer is seven, as we saw above.")
SCRIPT = [*THOUGHT, *ANSWER, *TAIL]
KEPT = len(THOUGHT) + len(ANSWER)


def ask(server, *, exits=True, contract=BOXED, request=None, count=1, **config):
    config = ServerConfig(**{"base_url": server.base_url, "backoff_s": 0.01, **config})
    fields = {"max_new_tokens": 200, **(request or {})}
    requests = [
        ChatRequest(key=key, messages=user_message(f"question {key}"), contract=contract, **fields)
        for key in range(count)
    ]

    async def run():
        async with StreamClient(config) as client:
            outputs = [output async for output in client.ask_all(requests, exits=exits)]
        return sorted(outputs, key=lambda output: output.key)

    outputs = asyncio.run(run())
    return outputs if count > 1 else outputs[0]


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_the_stream_is_closed_at_the_commit_and_the_server_stops():
    with Loopback(script=[*SCRIPT, *TAIL * 100], delay_s=0.005) as server:
        output = ask(server, request={"max_new_tokens": 5000})
        assert wait_until(lambda: server.running == 0)
        assert server.disconnects == 1
        past_commit = server.generated - KEPT
        assert 0 <= past_commit <= 20, "of 1,500 that it would have generated"
    assert (output.answer, output.finish_reason) == ("7", "contract")
    assert output.text == "".join(ANSWER)
    assert output.thinking == "".join(THOUGHT[1:-1])
    assert (output.tokens, output.kept_tokens, output.think_tokens) == (KEPT, KEPT, len(THOUGHT))
    assert output.counted_by == "chunks"
    assert 0 < output.first_token_s < output.seconds < 5


def test_without_the_exit_it_reads_to_the_end():
    with Loopback(script=SCRIPT) as server:
        output = ask(server, exits=False)
        assert (server.generated, server.disconnects) == (len(SCRIPT), 0)
    assert (output.answer, output.finish_reason, output.text) == ("7", "stop", "".join(ANSWER))
    assert (output.tokens, output.kept_tokens, output.counted_by) == (len(SCRIPT), KEPT, "chunks")


@pytest.mark.parametrize("channel", [("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")])
def test_thinking_in_a_channel_of_its_own_is_not_the_answer(channel):
    with Loopback(script=SCRIPT, channel=channel) as server:
        output = ask(server)
    assert (output.answer, output.text) == ("7", "".join(ANSWER))
    assert output.thinking == "".join(THOUGHT[1:-1])
    assert output.think_tokens == len(THOUGHT) - 2, "the markers are not sent"


def test_a_contract_for_anywhere_reads_the_thinking_too():
    contract = Contract.from_spec({"kind": "boxed", "scope": "anywhere"})
    with Loopback(script=SCRIPT, channel=("reasoning_content",)) as server:
        output = ask(server, contract=contract)
    assert (output.answer, output.finish_reason) == ("6", "contract")


def test_a_template_that_opens_the_think_block():
    with Loopback(script=SCRIPT[1:]) as server:
        assert ask(server, request={"starts_in_think": True}).answer == "7"
        assert ask(server).answer == "6", "else the thinking is read as an answer"


@pytest.mark.parametrize(
    ("script", "finish", "answer"),
    [
        ("</think>The answer is 12", "stop", "12"),
        ("</think>The answer is 12", "length", None),
        ("<think>The answer is 12", "stop", None),
    ],
)
def test_a_number_at_the_end_counts_after_a_natural_end_alone(script, finish, answer):
    with Loopback(script=tokens_of(script), finish=finish) as server:
        output = ask(server, contract=Contract.from_spec({"kind": "integer"}))
    assert (output.answer, output.finish_reason) == (answer, finish)


def test_the_cap_on_tokens_is_sent_and_cuts():
    with Loopback(script=SCRIPT) as server:
        output = ask(server, request={"max_new_tokens": KEPT - 1}, seed=5, temperature=0.5)
    assert (output.answer, output.finish_reason, output.tokens) == (None, "length", KEPT - 1)
    (body,) = server.bodies
    assert (body["model"], body["seed"], body["temperature"]) == ("scripted", 5, 0.5)
    assert "top_p" not in body


def test_characters_that_arrive_byte_by_byte():
    script = tokens_of("<think>日本</think>\\boxed{日本 😀é}")
    with Loopback(script=script, bytewise=True) as server:
        output = ask(server)
    assert (output.answer, output.text, output.thinking) == ("日本 😀é", "\\boxed{日本 😀é}", "日本")


@pytest.mark.parametrize(
    ("count", "counts", "counted_by"),
    [("continuous_usage", True, "usage"), ("usage", True, "chunks"), ("token_ids", True, "token_ids"),
     ("logprobs", True, "logprobs"), ("continuous_usage", False, "chunks")],
)  # fmt: skip
def test_tokens_are_counted_by_what_the_server_gives(count, counts, counted_by):
    with Loopback(script=SCRIPT, counts=counts, per_event=3) as server:
        output = ask_counting(server, count)
    assert output.counted_by == counted_by
    received = -(-KEPT // 3) if counted_by == "chunks" else -(-KEPT // 3) * 3
    assert output.tokens == received
    if counted_by == "logprobs":
        assert output.kept_tokens == KEPT


def ask_counting(server, how, **more):
    config = ServerConfig(base_url=server.base_url, count=how, **more)

    async def run():
        async with StreamClient(config) as client:
            return await client.ask(ChatRequest(key=0, messages=user_message("?"), contract=BOXED))

    return asyncio.run(run())


def test_usage_at_the_end_beats_the_count_of_chunks():
    with Loopback(script=SCRIPT, per_event=3) as server:
        output = ask(server, exits=False)
    assert output.tokens == len(SCRIPT)


@pytest.mark.parametrize("statuses", [[429], [500, 503], [408]])
def test_refusals_that_pass_are_retried(statuses):
    with Loopback(script=SCRIPT, statuses=list(statuses)) as server:
        output = ask(server)
    assert (output.answer, output.error, output.attempts) == ("7", None, 1 + len(statuses))


def test_the_server_says_how_long_to_wait():
    with Loopback(script=SCRIPT, statuses=[429], headers="retry-after: 0.3\r\n") as server:
        output = ask(server)
    assert output.answer == "7"
    assert output.seconds > 0.3, "waiting is part of the time to the answer"


def test_retries_end():
    with Loopback(script=SCRIPT, statuses=[500] * 9) as server:
        output = ask(server, retries=2)
        assert len(server.bodies) == 3
    assert (output.finish_reason, output.answer, output.tokens) == ("error", None, 0)
    assert "scripted 500" in output.error


def test_a_request_that_is_wrong_is_not_repeated_and_spoils_no_other():
    with Loopback(script=SCRIPT, statuses=[400]) as server:
        outputs = ask(server, count=3, concurrency=1)
    assert sorted((output.answer or "", output.attempts) for output in outputs) == [("", 1), ("7", 1), ("7", 1)]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_refuses_every_request_is_the_users_error(status):
    with Loopback(script=SCRIPT, statuses=[status]) as server, pytest.raises(ValueError, match=f"scripted {status}"):
        ask(server)


def test_a_broken_stream_begins_anew():
    with Loopback(script=SCRIPT, breaks=[5, 9]) as server:
        output = ask(server)
    assert (output.answer, output.attempts, output.text) == ("7", 3, "".join(ANSWER))
    assert (output.tokens, output.lost_tokens) == (KEPT, 5 + 9)


def test_a_stream_that_stalls_begins_anew():
    with Loopback(script=SCRIPT, breaks=[5], stall=True) as server:
        output = ask(server, stall_s=0.2)
    assert (output.answer, output.attempts, output.lost_tokens) == ("7", 2, 5)


def test_a_request_has_a_time_limit():
    with Loopback(script=SCRIPT, delay_s=0.05) as server:
        output = ask(server, timeout_s=0.3)
        assert wait_until(lambda: server.running == 0)
    assert (output.finish_reason, output.answer, output.error) == ("timeout", None, None)
    assert 0 < output.tokens < KEPT
    assert output.seconds == pytest.approx(0.3, abs=0.25)


def test_no_more_requests_than_allowed_are_under_way():
    with Loopback(script=SCRIPT, delay_s=0.002) as server:
        outputs = ask(server, count=7, concurrency=3)
        assert server.max_running == 3
    assert [output.key for output in outputs] == list(range(7))
    assert {output.answer for output in outputs} == {"7"}


@pytest.mark.parametrize("count", ["usage", "logprobs", "token_ids"])
@pytest.mark.parametrize("channel", [(), ("reasoning_content",)])
def test_a_server_that_cannot_stream_is_asked_for_a_few_tokens_at_a_time(count, channel):
    with Loopback(script=SCRIPT, channel=channel) as server:
        output = ask_counting(server, count, chunk=8)
        assert all("stream" not in body for body in server.bodies)
        assert [body["max_tokens"] for body in server.bodies] == [8] * len(server.bodies)
        assert server.generated == output.tokens
    assert (output.answer, output.text) == ("7", "".join(ANSWER))
    assert output.thinking == "".join(THOUGHT[1:-1])
    assert abs(output.think_tokens - len(THOUGHT)) <= 6, "within a chunk by the share of the characters"
    assert (output.finish_reason, output.calls, output.tokens) == ("contract", -(-KEPT // 8), -(-KEPT // 8) * 8)
    if count == "usage":
        assert abs(output.kept_tokens - KEPT) <= 3, "by the share of the characters"
    else:
        assert output.kept_tokens == KEPT, "by the texts of the tokens"
    prompts = [body["prompt"] for body in server.bodies if "prompt" in body]
    behind = [[PROMPT_ID, *range(8 * call)] for call in range(1, output.calls)] if count == "token_ids" else []
    assert prompts == behind


def test_chunks_end_with_the_cap_or_the_model():
    with Loopback(script=SCRIPT) as server:
        output = ask(server, exits=False, chunk=8)
        assert (output.finish_reason, output.tokens, output.answer) == ("stop", len(SCRIPT), "7")
        output = ask(server, request={"max_new_tokens": 11}, chunk=8)
        assert (output.finish_reason, output.tokens, output.answer) == ("length", 11, None)


def test_a_failed_chunk_is_repeated_by_itself():
    with Loopback(script=SCRIPT) as server:
        server.statuses = []
        plain = ask(server, chunk=8)
        server.statuses = [500]
        output = ask(server, chunk=8)
    assert (output.answer, output.lost_tokens) == ("7", 0)
    assert (output.attempts, output.calls) == (plain.attempts + 1, plain.calls)


def test_the_model_must_be_clear():
    with Loopback(models=("a", "b")) as server, pytest.raises(ValueError, match=r"serves a, b; choose with --model"):
        ask(server)
    with Loopback(script=SCRIPT, models=("a", "b")) as server:
        assert ask(server, model="b").answer == "7"


def test_a_server_that_is_not_there():
    with pytest.raises(ValueError, match=r"cannot list the models of http://127.0.0.1:9/v1"):
        unreachable()


def test_a_web_page_is_no_model_list():
    with (
        Loopback(page=True) as server,
        pytest.raises(ValueError, match=r"cannot list the models of .* lists no models"),
    ):
        ask(server)


@pytest.mark.parametrize(("chunk", "message"), [(0, "the stream is empty"), (8, "the reply has no choices")])
def test_a_web_page_is_no_answer(chunk, message):
    with Loopback(page=True) as server:
        output = ask(server, model="m", chunk=chunk, retries=1)
    assert (output.finish_reason, output.answer, output.attempts) == ("error", None, 2)
    assert message in output.error


def unreachable():
    async def run():
        async with StreamClient(ServerConfig(base_url="http://127.0.0.1:9/v1", retries=0)) as client:
            await client.model()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url must be like"),
        ({"concurrency": 0}, "concurrency must be >= 1"),
        ({"timeout_s": 0.0}, "timeout_s must be > 0"),
        ({"stall_s": float("nan")}, "stall_s must be > 0"),
        ({"chunk": -1}, "chunk must be >= 0"),
        ({"body": {"max_tokens": 3}}, "body must not hold max_tokens"),
        ({"body": {"max_completion_tokens": 3}, "chunk": 4}, "would be ignored with chunk"),
        ({"count": "continuous_usage", "chunk": 4}, "goes with streams"),
    ],
)
def test_a_server_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**fields)

import asyncio
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.vllm.servers import KEY, NAME, examples, ours, running_server, stock, write_head

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
openai = pytest.importorskip("openai")

PROBLEMS = examples(24)
CAP = 400
SOAK = 1000
AT_ONCE = 32


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    write_head(folder)
    return folder


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def server(request, head, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    settings = {
        "head": str(head),
        "contracts": {"number": {"kind": "integer"}},
        "audit_log": str(folder / "audit.jsonl"),
        "runtime_switch": True,
    }
    with running_server(ours(settings, speculation=request.param), folder) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


def keys(example=None, **more):
    found = {f"ace_{name}": value for name, value in more.items()}
    if example is not None:
        found["ace_contract"] = json.dumps(example.contract.to_spec())
    return {"vllm_xargs": found, "skip_special_tokens": False}


def ask(client, example, body, **more):
    more = {"temperature": 0.0, "max_completion_tokens": CAP, **more}
    return client.chat.completions.create(model=NAME, messages=list(example.messages), extra_body=body, **more)


def at_once(function, items):
    """The results of a function for all items, called from as many threads as the server takes requests."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, items))


def read_stream(chunks):
    """Id, text, finish and stop reason of a streamed reply."""
    text, choice, name = "", None, None
    for chunk in chunks:
        name = chunk.id
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return name, text, choice.finish_reason, choice.stop_reason


def record_of(reply):
    return reply.kv_transfer_params["ace_learn"]


def told(server, request_id):
    status, body = server.call("GET", f"/ace/audit/{request_id}")
    assert status == 200, body
    return json.loads(body)["records"]


def shadow(server, on):
    assert server.call("POST", "/ace/shadow", {"shadow": on}) == (200, json.dumps({"shadow": on}).encode())


def test_requests_exit_and_commit_and_say_so(server, client):
    before = server.metrics("ace_learn_")
    plain = at_once(lambda example: ask(client, example, keys()), PROBLEMS)
    replies = at_once(lambda example: ask(client, example, keys(example, enabled=True)), PROBLEMS)
    for example, full, reply in zip(PROBLEMS, plain, replies, strict=True):
        record, choice = record_of(reply), reply.choices[0]
        assert full.kv_transfer_params is None
        assert record["tokens"] == reply.usage.completion_tokens
        assert record["surplus"] == 0
        assert not record["certified"]
        committed = example.contract.project(choice.message.content, starts_in_think=True)
        if record["finish_reason"] == "contract":
            assert (choice.finish_reason, choice.stop_reason) == ("stop", "ace_contract")
            assert committed.answer == record["answer"]
            assert committed.end == len(choice.message.content)
        if record["reason"] == "policy":
            assert set(record["signals"]) >= set(record["thresholds"])
            thought, *_ = choice.message.content.partition("</think>")
            assert full.choices[0].message.content.startswith(thought)
            assert reply.usage.completion_tokens < full.usage.completion_tokens
    records = [record_of(reply) for reply in replies]
    reasons = [record["reason"] for record in records]
    assert len(PROBLEMS) // 4 <= reasons.count("policy") <= 3 * len(PROBLEMS) // 4
    assert sum(record["finish_reason"] == "contract" for record in records) >= len(PROBLEMS) // 2
    assert sum(record["spec"]["accepted"] for record in records) > 0
    after = server.metrics("ace_learn_")

    def grown(name):
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown('ace_learn_exits_total{reason="policy"}') == reasons.count("policy")
    assert grown("ace_learn_contract_commits_total") == sum(r["finish_reason"] == "contract" for r in records)
    assert grown("ace_learn_surplus_tokens_total") == grown("ace_learn_hook_failures_total") == 0


def test_a_stream_gives_the_same_and_its_record_is_kept(server, client):
    def both(example):
        body = keys(example, enabled=True)
        return ask(client, example, body), read_stream(ask(client, example, body, stream=True))

    for whole, (name, text, finish_reason, stop_reason) in at_once(both, PROBLEMS[:8]):
        choice, wanted = whole.choices[0], record_of(whole)
        assert text == choice.message.content
        assert (finish_reason, stop_reason) == (choice.finish_reason, choice.stop_reason)
        [record] = told(server, name)
        exact = wanted.keys() - {"spec", "signals"}
        assert {key: record[key] for key in exact} == {key: wanted[key] for key in exact}
        # Another batch, and a prompt out of the prefix cache, round otherwise in the last digits of float32.
        assert record["signals"] == (wanted["signals"] and pytest.approx(wanted["signals"], rel=1e-5, abs=1e-5))
        assert [record["request_id"], record["index"]] == [name, 0]


def test_all_choices_and_prompts_have_their_records(server, client):
    reply = client.completions.create(
        model=NAME, prompt=["<think>\n3 + 4 = 7", "<think>\n1"], n=2, max_tokens=8, temperature=1.0, seed=1,
        extra_body=keys(enabled=True),
    )  # fmt: skip
    assert len(reply.choices) == 4
    records = told(server, reply.id)
    assert [(record["request_id"], record["index"]) for record in records] == [
        (f"{reply.id}-{prompt}", index) for prompt in range(2) for index in range(2)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"ace_enable": True}, "unknown request key 'ace_enable'; did you mean ace_enabled"),
        ({"ace_enabled": "yes"}, "ace_enabled must be true or false, not 'yes'"),
        ({"ace_enabled": True, "ace_patience": 0}, "ace_patience must be from 1"),
        ({"ace_enabled": True, "ace_threshold": "{"}, "ace_threshold is no JSON"),
        ({"ace_contract": "nmuber"}, "no name of the server's table (known: number)"),
        ({"ace_contract": '{"kind": "regex", "pattern": "("}'}, "ace_contract:"),
        ({"ace_shadow": True}, "ace_shadow is not read without exits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_keys_get_a_400_that_says_what_to_do(client, stream, xargs, message):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, PROBLEMS[0], {"vllm_xargs": xargs}, stream=stream)
    assert message in caught.value.message


def test_booleans_survive_the_flat_arguments(client):
    for value in (True, 1, "true"):
        assert ask(client, PROBLEMS[0], keys(enabled=value), max_completion_tokens=4).kv_transfer_params is not None
    off = ask(client, PROBLEMS[0], keys(enabled=False), max_completion_tokens=4)
    assert off.kv_transfer_params is None


def test_nothing_goes_without_the_key(server):
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger, PROBLEMS[0], keys(enabled=True))
    for method, path in (("GET", "/ace/audit/x"), ("GET", "/ace/status"), ("POST", "/ace/shadow")):
        assert server.call(method, path, {"shadow": True} if method == "POST" else None, key="wrong")[0] == 401
    assert json.loads(server.call("GET", "/ace/status")[1])["shadow"] is False


def test_the_switch_stops_exits_and_lets_them_go_on(server, client):
    replies = at_once(lambda example: ask(client, example, keys(enabled=True)), PROBLEMS)
    exiting = next(e for e, r in zip(PROBLEMS, replies, strict=True) if record_of(r)["reason"] == "policy")
    full = ask(client, exiting, keys()).choices[0].message.content
    shadow(server, True)
    try:
        shadowed = ask(client, exiting, keys(enabled=True))
    finally:
        shadow(server, False)
    assert record_of(shadowed)["reason"] == "shadow"
    assert shadowed.choices[0].message.content == full
    assert record_of(ask(client, exiting, keys(enabled=True)))["reason"] == "policy"


def test_the_audit_log_is_for_its_owner_alone(server, client):
    ask(client, PROBLEMS[0], keys(PROBLEMS[0], enabled=True))
    log = server.log.parent / "audit.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"request_id", "answer", "reason", "time"} <= set(lines[-1])


def test_a_thousand_requests_with_aborts_leave_nothing_behind(server, record_property):
    started = time.monotonic()
    outcomes = asyncio.run(_soak(server.url))
    record_property("soak_seconds", round(time.monotonic() - started, 1))
    print(f"{SOAK} requests in {time.monotonic() - started:.1f} s: {outcomes}")
    assert sum(outcomes.values()) == SOAK
    assert outcomes["refused"] > 0
    assert outcomes["aborted"] > SOAK // 20
    assert outcomes["exit"] > SOAK // 20
    assert outcomes["whole"] > SOAK // 10
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120) as after:
        end = time.monotonic() + 60
        while any(server.metrics("vllm:num_requests_").values()) and time.monotonic() < end:
            time.sleep(0.2)
        assert not any(server.metrics("vllm:num_requests_running").values())
        assert record_of(ask(after, PROBLEMS[0], keys(PROBLEMS[0], enabled=True)))["hook_failures"] == []
        ask(after, PROBLEMS[0], keys(), max_completion_tokens=4)  # the step that tells the workers who is gone
    [worker] = json.loads(server.call("GET", "/ace/status")[1])["workers"]
    assert (worker["followed"], worker["slots"], worker["off"]) == (0, 0, False)
    assert server.call("GET", "/health")[0] == 200
    assert not any(server.metrics("ace_learn_hook_failures_total").values())
    assert not any(server.metrics("vllm:kv_cache_usage_perc").values())


async def _soak(url):
    rng = random.Random(5)
    outcomes = dict.fromkeys(("refused", "aborted", "exit", "whole"), 0)
    gate = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=600) as client:

        async def one(kind, example, cap, patience):
            async with gate:
                outcomes[await _ask_one(client, kind, example, cap, patience)] += 1

        await asyncio.gather(*(
            one(rng.choices(("bad", "cut", "exit", "contract", "plain"), (1, 4, 6, 2, 2))[0], rng.choice(PROBLEMS),
                rng.randint(16, 160), rng.randint(0, 40))
            for _ in range(SOAK)
        ))  # fmt: skip
    return outcomes


async def _ask_one(client, kind, example, cap, patience):
    """One request of the mix: refused, aborted after some chunks or milliseconds, exited, or run to its end."""
    body = {
        "bad": keys(enabled="maybe"),
        "cut": keys(example, enabled=True),
        "exit": keys(example, enabled=True),
        "contract": keys(example),
        "plain": keys(),
    }[kind]
    call = client.chat.completions.create(
        model=NAME, messages=list(example.messages), extra_body=body, temperature=0.0, max_completion_tokens=cap,
        stream=kind == "cut",
    )  # fmt: skip
    if kind == "bad":
        with pytest.raises(openai.BadRequestError):
            await call
        return "refused"
    if kind == "cut":
        stream = await call
        async for _ in stream:
            patience -= 1
            if patience < 0:
                await stream.close()
                return "aborted"
        return "whole"
    reply = await call
    record = (reply.kv_transfer_params or {}).get("ace_learn")
    assert (record is None) == (kind == "plain")
    return "exit" if record is not None and record["reason"] == "policy" else "whole"


@pytest.fixture(scope="module")
def stock_replies(tmp_path_factory):
    """What two servers without our configuration say: one that knows our plugin, one that does not load it."""
    found = []
    for plugins in (None, ""):
        with running_server(stock(), tmp_path_factory.mktemp("stock"), VLLM_PLUGINS=plugins) as running:
            found.append([_raw(running, path, body) for path, body in _bodies()])
    return found


def _bodies():
    chat, text = "/v1/chat/completions", "/v1/completions"
    for number, example in enumerate(PROBLEMS[:6]):
        body = {"model": NAME, "messages": list(example.messages), "max_completion_tokens": 120, "temperature": 0.0}
        yield chat, body | {"stream": number % 2 == 1, "logprobs": True, "top_logprobs": 2}
    # Greedy: on a CPU, vLLM's V1 runner draws drafted rows at uninitialised temperatures (`cpu_fix`), stock or not.
    body = {"model": NAME, "prompt": ["<think>\n3 + 4", "a"], "max_tokens": 40}
    yield text, body | {"temperature": 0.0, "stop": ["\n\n"], "logprobs": 2}
    yield text, body | {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    yield text, body | {"temperature": 0.0, "vllm_xargs": {"ace_enabled": "nonsense", "ace_x": 1}}
    yield text, body | {"max_tokens": -1}
    yield "/ace/status", {}


def _raw(server, path, body):
    """A reply's bytes without the moment of its making; ids follow from the header."""
    status, reply = server.call("POST", path, body, headers={"X-Request-Id": "fixed"})
    document = re.sub(r'"created":\d+', '"created":0', reply.decode())
    return status, _joined(document) if body.get("stream") else document


def _joined(stream):
    """The chunks of a stream put together by choice: where one ends and the next begins is a matter of timing."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    found = {"usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")]}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish_reason": None})
            told["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            told["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            told |= {key: choice[key] for key in ("finish_reason", "stop_reason") if choice.get(key) is not None}
    assert any(told["text"] for told in found.values() if told is not found["usage"])
    return found


def test_a_server_that_is_not_configured_answers_like_stock(stock_replies):
    ours_there, without = stock_replies
    assert [status for status, _ in without] == [200] * 9 + [400, 404]
    assert ours_there == without

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ace_learn.engines.vllm.middleware import AceEndpoints
from ace_learn.exit import ExitPolicy

KEY = {"authorization": "Bearer right"}
RECORD = {"reason": "policy"}


@pytest.fixture
def head(tmp_path):
    (tmp_path / "policy.json").write_text(json.dumps(ExitPolicy.specexit().to_json()))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def observer(monkeypatch):
    """Stands in for the module that needs vLLM; it knows one request."""
    module = ModuleType("ace_learn.engines.vllm.observer")
    module.observer = lambda: SimpleNamespace(store=SimpleNamespace(get={"cmpl-1": [RECORD]}.get))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


class Server:
    """An app behind the middleware, which answers 299 to what comes through."""

    def __init__(self, settings, api_key=("right",), processes=None):
        config = SimpleNamespace(additional_config={} if settings is None else {"ace_learn": settings})
        self.calls = []
        client = SimpleNamespace(input_processor=SimpleNamespace(vllm_config=config), collective_rpc=self.rpc)
        arguments = SimpleNamespace(api_key=list(api_key) if api_key else None, api_server_count=processes)
        self.state = SimpleNamespace(args=arguments, engine_client=client)
        self.endpoints = AceEndpoints(self.app)

    async def rpc(self, method, timeout=None):
        self.calls.append(method)
        return [{"exits": True}]

    async def app(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(self, method, path, body=b"", headers=KEY, **scope):
        sent, parts = [], [body[i : i + 7] for i in range(0, len(body), 7)] or [b""]

        async def receive():
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        asked = {"type": "http", "method": method, "path": path, "headers": pairs, "app": self} | scope
        asyncio.run(self.endpoints(asked, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


def test_other_paths_and_other_servers_are_left_alone(head):
    assert Server({"head": head}).ask("GET", "/health", headers={})[0] == 299
    assert Server({"head": head}).ask("GET", "/ace/status", type="websocket")[0] == 299
    assert Server(None).ask("GET", "/ace/status", headers={})[0] == 299


def test_a_record_is_given_by_its_id():
    server = Server({})
    assert server.ask("GET", "/ace/audit/cmpl-1") == (200, {"request_id": "cmpl-1", "records": [RECORD]})
    status, body = server.ask("GET", "/ace/audit/cmpl-2")
    assert status == 404
    assert "no audit record of 'cmpl-2'" in body["error"]["message"]
    assert server.ask("GET", "/v1x/ace/audit/cmpl-1", root_path="/v1x")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"authorization": "Basic right"},
     {"authorization": "Bearer \u00e9"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/ace/audit/cmpl-1"), ("GET", "/ace/status"), ("POST", "/ace/shadow"), ("GET", "/ace/x")],
)
def test_nothing_is_told_without_the_key(headers, method, path):
    server = Server({})
    status, body = server.ask(method, path, b'{"shadow": true}', headers=headers)
    assert status == 401
    assert "API key" in body["error"]["message"]
    assert not server.calls


def test_the_key_may_come_from_the_environment_or_be_one_of_several(monkeypatch):
    assert Server({}, api_key=("left", "right")).ask("GET", "/ace/status")[0] == 200
    assert Server({}, api_key=None).ask("GET", "/ace/status", headers={})[0] == 200
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert Server({}, api_key=None).ask("GET", "/ace/status", headers={})[0] == 401
    assert Server({}, api_key=None).ask("GET", "/ace/status", headers={"Authorization": "bearer right"})[0] == 200


def test_status_asks_the_workers_where_there_is_a_head(head):
    server = Server({"head": head})
    status, body = server.ask("GET", "/ace/status")
    assert status == 200
    assert body["workers"] == [{"exits": True}]
    assert body["policy"]["thresholds"] == {"confidence": 0.8, "progress": 0.3, "remaining": 200.0}
    assert (body["shadow"], body["certified"]) == (False, False)
    bare = Server({})
    assert bare.ask("GET", "/ace/status")[1]["workers"] == []
    assert (server.calls, bare.calls) == (["ace_status"], [])


def test_the_switch_flips_shadow_mode(head):
    server = Server({"head": head, "runtime_switch": True})
    assert server.ask("POST", "/ace/shadow", b'{"shadow": true}') == (200, {"shadow": True})
    assert server.ask("GET", "/ace/status")[1]["shadow"] is True
    assert server.ask("POST", "/ace/shadow", b'{"shadow": false}') == (200, {"shadow": False})
    assert server.ask("GET", "/ace/status")[1]["shadow"] is False


def test_the_switch_does_not_switch_one_process_of_several(head):
    server = Server({"head": head, "runtime_switch": True}, processes=2)
    assert server.ask("POST", "/ace/shadow", b'{"shadow": true}')[0] == 409
    assert server.ask("GET", "/ace/status")[1]["shadow"] is False


def test_the_switch_is_off_by_default(head):
    status, body = Server({"head": head}).ask("POST", "/ace/shadow", b'{"shadow": true}')
    assert status == 403
    assert "runtime_switch" in body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"true",
        b'{"shadow": 1}',
        b'{"shadow": true, "x": 1}',
        b"\xff",
        b"[" * 1000,
        b'{"shadow": true}' + b" " * 2000,
    ],
    ids=range(7),
)
def test_the_switch_takes_one_boolean(head, body):
    server = Server({"head": head, "runtime_switch": True})
    status, reply = server.ask("POST", "/ace/shadow", body)
    assert (status, reply["error"]["message"]) == (400, 'send {"shadow": true} or {"shadow": false}')
    assert server.ask("GET", "/ace/status")[1]["shadow"] is False


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/ace/status", 405),
        ("GET", "/ace/shadow", 405),
        ("DELETE", "/ace/audit/cmpl-1", 405),
        ("GET", "/ace/", 404),
    ],
)
def test_wrong_methods_and_paths_are_said_to_be_wrong(method, path, status):
    assert Server({}).ask(method, path)[0] == status

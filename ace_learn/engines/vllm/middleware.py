"""Endpoints beside those of vLLM's server, by `--middleware ace_learn.engines.vllm.middleware.AceEndpoints`.

    GET  /ace/audit/{request_id}   what became of a request, streamed ones included
    GET  /ace/status               what is served, and what the hooks of the workers say
    POST /ace/shadow               {"shadow": true}: from now on exits are recorded and not forced (`runtime_switch`)

They ask for the server's API key, which vLLM itself asks for under some paths only. Of vLLM they read `app.state`
(`args`, `engine_client`) as its own routers do, and `EngineClient.collective_rpc`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ace_learn.engines.vllm.settings import Settings
from ace_learn.engines.vllm.validation import Admission, admission_of
from ace_learn.json_type import JSON

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

_PREFIX = "/ace/"
_AUDIT, _STATUS, _SHADOW = "/ace/audit/", "/ace/status", "/ace/shadow"
_LARGEST_BODY = 1024
_RPC_SECONDS = 30.0


@runtime_checkable
class ServerArguments(Protocol):
    """The command line of vLLM's server."""

    api_key: list[str] | None
    api_server_count: int | None


@runtime_checkable
class Client(Protocol):
    """What is asked of vLLM's `EngineClient`."""

    input_processor: InputProcessor

    async def collective_rpc(self, method: str, timeout: float | None = None) -> list[JSON]:
        """Calls a method of every worker."""
        ...


@runtime_checkable
class AppState(Protocol):
    """What is read of the app's state."""

    args: ServerArguments
    engine_client: Client


class _Reply(NamedTuple):
    """An answer."""

    status: int
    body: dict[str, JSON]


class AceEndpoints:
    """An ASGI middleware; other paths pass to the server, and all of them do where it is not configured for us."""

    def __init__(self, app: App) -> None:
        """Stands before an app."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
        if scope["type"] != "http" or not path.startswith(_PREFIX):
            return await self.app(scope, receive, send)
        state: AppState = getattr(scope["app"], "state")  # noqa: B009 - the scope's values are of any type
        admission = admission_of(state.engine_client.input_processor)
        if admission.settings is None:
            return await self.app(scope, receive, send)
        reply = await _answer(str(scope["method"]), path, scope, receive, state=state, admission=admission)
        return await _send(reply, send)


async def _answer(
    method: str, path: str, scope: Message, receive: Receive, *, state: AppState, admission: Admission
) -> _Reply:
    wanted = "POST" if path == _SHADOW else "GET"
    assert admission.settings is not None, "else the request is the server's own"
    if not authorised(scope, state.args.api_key):
        return _error(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
    if path not in (_SHADOW, _STATUS) and not path.startswith(_AUDIT):
        return _error(404, f"no such endpoint; there are GET {_AUDIT}REQUEST_ID, GET {_STATUS} and POST {_SHADOW}")
    if method != wanted:
        return _error(405, f"{path} takes {wanted}, not {method}")
    if path == _SHADOW:
        return _switch(await _body(receive), admission, processes=state.args.api_server_count or 1)
    if path == _STATUS:
        return await _status(state, admission)
    return _audit(path.removeprefix(_AUDIT), admission.settings)


def authorised(scope: Message, keys: Iterable[str] | None) -> bool:
    """Whether a request brings one of the server's keys; like vLLM's own check, in constant time.

    Args:
        scope: The request.
        keys: Of `--api-key`; without any, VLLM_API_KEY holds the key, or there is none.
    """
    known = [key for key in keys or [os.environ.get("VLLM_API_KEY", "")] if key]
    if not known:
        return True
    headers = scope["headers"]
    assert isinstance(headers, Iterable)
    brought = next((value.decode("latin-1") for name, value in headers if name.lower() == b"authorization"), "")
    scheme, _, given = brought.partition(" ")
    digest = hashlib.sha256(given.encode()).digest()
    matches = [secrets.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in known]
    return scheme.lower() == "bearer" and any(matches)


def _audit(request_id: str, settings: Settings) -> _Reply:
    from ace_learn.engines.vllm.observer import observer

    found = observer()
    records = None if found is None else found.store.get(request_id)
    if records is None:
        return _error(
            404,
            f"no audit record of {request_id!r}: it has not finished, asked for neither exits nor a contract, went "
            f"through another API process, or is none of the last {settings.audit_records} requests (audit_records)",
        )
    return _Reply(200, {"request_id": request_id, "records": list(records)})


async def _status(state: AppState, admission: Admission) -> _Reply:
    settings, policy = admission.settings, admission.policy
    assert settings is not None, "else the request is the server's own"
    workers: list[JSON] = []
    if settings.head is not None:
        workers = await state.engine_client.collective_rpc("ace_status", timeout=_RPC_SECONDS)
    return _Reply(
        200,
        {
            "shadow": admission.shadow,
            "settings": settings.to_json(),
            "policy": None if policy is None else {**policy.to_json(), "certificate": None},
            "certified": policy is not None and policy.certificate is not None,
            "workers": workers,
        },
    )


def _switch(body: bytes | None, admission: Admission, *, processes: int) -> _Reply:
    if admission.settings is None or not admission.settings.runtime_switch:
        return _error(403, "this server was started without `runtime_switch: true`, so shadow mode stays what it is")
    if processes > 1:
        return _error(409, f"only one of {processes} API processes would switch; start with --api-server-count 1")
    try:
        value: JSON = json.loads(body or b"")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or set(value) != {"shadow"} or not isinstance(value["shadow"], bool):
        return _error(400, 'send {"shadow": true} or {"shadow": false}')
    admission.shadow = value["shadow"]
    return _Reply(200, {"shadow": admission.shadow})


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None where it is larger than any that we take."""
    body = b""
    while True:
        message = await receive()
        part = message.get("body", b"")
        assert isinstance(part, bytes)
        body += part
        if len(body) > _LARGEST_BODY:
            return None
        if not message.get("more_body"):
            return body


def _error(status: int, message: str) -> _Reply:
    kinds = {401: "AuthenticationError", 404: "NotFoundError"}
    return _Reply(
        status,
        {"error": {"message": message, "type": kinds.get(status, "BadRequestError"), "param": None, "code": status}},
    )


async def _send(reply: _Reply, send: Send) -> None:
    body = json.dumps(reply.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""A small OpenAI-compatible server on loopback that says what a script tells it, and counts what it generates."""

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import dataclass, field

PROMPT_ID = 1000
"""Stands for the prompt where token ids are asked for; a token's id is its place in the script."""


def tokens_of(text):
    """Tokens of a text: think markers, words with the space before them, newlines, digits, and other characters."""
    return re.findall(r"</?think>| ?[^\W\d]+|\s*\n\s*|.", text)


@dataclass(kw_only=True)
class Loopback:
    """The server; use it as a context manager."""

    script: list = field(default_factory=list)
    """Tokens of each answer, or a function from the request's last user turn to them."""
    finish: str = "stop"
    channel: tuple = ()
    """Fields that thinking is sent in; none: in the content, markers and all."""
    delay_s: float = 0.0
    """Seconds per token."""
    statuses: list = field(default_factory=list)
    """States with which the first calls are refused."""
    headers: str = ""
    """Further headers of such a refusal."""
    breaks: list = field(default_factory=list)
    """The first streams break off, or stall, behind so many tokens each."""
    stall: bool = False
    bytewise: bool = False
    """Send every byte by itself."""
    per_event: int = 1
    """Tokens of an event."""
    counts: bool = True
    """Send usage."""
    metrics: bool = True
    page: bool = False
    """Answer everything with a web page."""
    models: tuple = ("scripted",)
    max_running: int = 0
    generated: int = 0
    running: int = 0
    disconnects: int = 0
    bodies: list = field(default_factory=list)

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self):
        self._handlers = set()
        return await asyncio.start_server(self._handle, "127.0.0.1", 0)

    async def _close(self):
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def _handle(self, reader, writer):
        self._handlers.add(asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = json.loads(await reader.readexactly(int(length[1]))) if length else None
            await self._answer(head.split()[1], body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._handlers.discard(asyncio.current_task())
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, path, body, reader, writer):
        if self.page:
            await self._send(writer, 200, "<html>hello</html>", kind="text/html")
        elif path == "/metrics":
            text = (
                f'vllm:num_requests_running{{engine="0",model_name="a}}b"}} {float(self.running)}\n'
                f'vllm:generation_tokens_total{{engine="0"}} {float(self.generated)}\n'
            )
            await self._send(writer, 200 if self.metrics else 404, text if self.metrics else "none")
        elif path == "/v1/models":
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "me"} for name in self.models]
            await self._send(writer, 200, json.dumps({"object": "list", "data": models}))
        else:
            self.bodies.append(body)
            if self.statuses:
                status = self.statuses.pop(0)
                await self._send(writer, status, json.dumps({"error": {"message": f"scripted {status}"}}), self.headers)
                return
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            try:
                if body.get("stream"):
                    await self._stream(body, reader, writer)
                else:
                    await self._send(writer, 200, json.dumps(await self._whole(path, body)))
            finally:
                self.running -= 1

    async def _send(self, writer, status, text, headers="", *, kind="application/json"):
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{headers}"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + data)
        await writer.drain()

    def _tokens(self, body):
        if callable(self.script):
            return self.script([message for message in body["messages"] if message["role"] == "user"][-1]["content"])
        return self.script

    def _parts(self, tokens, *, thinking=False):
        """Fields of a message for each token, and whether thinking is open behind them."""
        parts = []
        for token in tokens:
            if self.channel and token in ("<think>", "</think>"):
                thinking = token == "<think>"
                parts.append({})
            else:
                parts.append(dict.fromkeys(self.channel if thinking and self.channel else ("content",), token))
        return parts

    async def _stream(self, body, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"connection: close\r\n\r\n")
        tokens = self._tokens(body)[: body["max_tokens"]]
        parts = self._parts(tokens)
        limit = self.breaks.pop(0) if self.breaks else None
        continuous = (body.get("stream_options") or {}).get("continuous_usage_stats")
        await self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for start in range(0, len(tokens), self.per_event):
            if limit is not None and start >= limit:
                if self.stall:
                    await asyncio.sleep(30)
                return
            together = range(start, min(start + self.per_event, len(tokens)))
            for _ in together:
                await asyncio.sleep(self.delay_s)
                if reader.at_eof():
                    self.disconnects += 1
                    return
                self.generated += 1
            delta = {}
            for at in together:
                for name, text in parts[at].items():
                    delta[name] = delta.get(name, "") + text
            choice = {"index": 0, "delta": delta, "finish_reason": None, **self._details(body, tokens, together)}
            usage = {"usage": _usage(together[-1] + 1)} if continuous and self.counts else {}
            await self._event(writer, {"choices": [choice], **usage})
        cut = len(self._tokens(body)) > len(tokens)
        done = [{"index": 0, "delta": {}, "finish_reason": "length" if cut else self.finish}]
        await self._event(writer, {"choices": done})
        if self.counts and body.get("stream_options"):
            await self._event(writer, {"choices": [], "usage": _usage(len(tokens))})
        await self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _details(self, body, tokens, places):
        details = {}
        if body.get("logprobs"):
            content = [
                {"token": tokens[at], "bytes": list(tokens[at].encode()), "logprob": 0.0, "top_logprobs": []}
                for at in places
            ]
            details["logprobs"] = {"content": content, "refusal": None}
        if body.get("return_token_ids"):
            details["token_ids"] = list(places)
        return details

    async def _event(self, writer, event):
        text = json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "scripted", **event},
                          ensure_ascii=False)  # fmt: skip
        await self._write(writer, f"data: {text}\n\n".encode())

    async def _write(self, writer, data):
        for piece in [data[at : at + 1] for at in range(len(data))] if self.bytewise else [data]:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()

    async def _whole(self, path, body):
        """An answer in one piece: behind the token ids of the prompt, or behind the assistant's text so far."""
        if path == "/v1/completions":
            tokens, start = self.script, len(body["prompt"]) - 1
        else:
            tokens, last = self._tokens(body), body["messages"][-1]
            behind = last["content"] if last["role"] == "assistant" else ""
            joined = ["".join(tokens[:count]) for count in range(len(tokens) + 1)]
            assert behind in joined, f"no text of mine: {behind!r}"
            assert ("continue_final_message" in body) == bool(behind)
            start = joined.index(behind)
        places = range(start, min(start + body["max_tokens"], len(tokens)))
        await asyncio.sleep(self.delay_s * len(places))
        self.generated += len(places)
        ended = places.stop == len(tokens)
        choice = {"index": 0, "finish_reason": self.finish if ended else "length"}
        reply = {"id": "x", "created": 0, "model": "scripted", "choices": [choice]}
        reply |= {"usage": _usage(len(places))} if self.counts else {}
        texts = [tokens[at] for at in places]
        details = self._details(body, tokens, places)
        if path == "/v1/completions":
            listed = {"tokens": texts} if "logprobs" in body else None
            choice |= {"text": "".join(texts), **details, "logprobs": listed}
            return reply
        thinking = tokens[:start].count("<think>") > tokens[:start].count("</think>")
        message = {"role": "assistant", "content": ""}
        for part in self._parts(texts, thinking=thinking):
            for name, text in part.items():
                message[name] = message.get(name, "") + text
        choice |= {"message": message, **details}
        return reply | ({"prompt_token_ids": [PROMPT_ID]} if body.get("return_token_ids") else {})


def _usage(tokens):
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}

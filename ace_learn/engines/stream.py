"""Contract exits on any OpenAI-compatible server: the stream is closed where the answer is complete.

Needs no plugin in the server, and knows nothing of learned exits: the text is read as it arrives, and the connection is
closed at the commit, upon which the server stops generating. A server that cannot stream is asked for a few tokens at a
time instead. The client is `openai` (the extra `stream`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, cast

import openai

from ace_learn.engines.answer_reader import AnswerReader, CountedBy, Piece, ServedOutput
from ace_learn.engines.server import ChatRequest, ServerConfig
from ace_learn.engines.server_text import BadReplyError, Part, chat_part, model_names, stream_part, text_part

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

T = TypeVar("T")

Failure: TypeAlias = openai.APIError | json.JSONDecodeError | BadReplyError
"""What a call may fail with: the server's refusal, a broken connection, a reply that cannot be read."""

FAILURES = (openai.APIError, json.JSONDecodeError, BadReplyError)
_RETRIED = frozenset((408, 409, 425, 429))
"""Besides all 5xx."""
_HOPELESS = frozenset((401, 403, 404))
"""No request would fare better."""
_LONGEST_WAIT = 60.0


class StreamClient:
    """Asks a server, a limited number of requests at a time: `async with StreamClient(config) as client: ...`."""

    def __init__(self, config: ServerConfig) -> None:
        """Prepares the client; nothing is sent yet."""
        self.config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=os.environ.get(config.api_key_variable) or "none",
            max_retries=0,  # retried here, so that broken streams count as well
            timeout=openai.Timeout(config.stall_s, connect=min(10.0, config.stall_s)),
        )
        self._model = config.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def model(self) -> str:
        """The model to ask: the configured one, or the only one that the server has.

        Raises:
            ValueError: The server cannot be reached, or has several models.
        """
        if self._model is None:
            try:
                listing = partial(self._client.get, "/models", cast_to=object)
                names = model_names(await self._retrying(_Attempts(), listing))
            except FAILURES as error:
                raise ValueError(
                    f"cannot list the models of {self.config.base_url}: {_words(error)}; check --base_url (most end in "
                    "/v1) and that the server runs, or name the model with --model"
                ) from error
            if len(names) != 1:
                raise ValueError(f"{self.config.base_url} serves {', '.join(names)}; choose with --model")
            (self._model,) = names
        return self._model

    async def ask(self, request: ChatRequest, *, exits: bool = True) -> ServedOutput:
        """Sends a request when its turn comes, and reads the answer.

        Args:
            request: What to ask.
            exits: Close the stream at the commit; off: read on to the end, as a plain client would.

        Returns:
            The output. A request that cannot be completed has `error`; others may fare better.

        Raises:
            ValueError: The server refuses every request: it knows neither the key nor the model.
        """
        model = await self.model()
        async with self._slots:
            run = _Run(request, model=model, exits=exits)
            finish, error = "error", None
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    finish = await self._finish(run)
            except TimeoutError:
                finish = "timeout"
            except openai.APIStatusError as refused:
                if refused.status_code in _HOPELESS:
                    raise ValueError(f"{self.config.base_url} refuses: {_words(refused)}") from refused
                error = _words(refused)
            except FAILURES as broken:
                error = _words(broken)
            return run.output(finish, error)

    async def ask_all(self, requests: Sequence[ChatRequest], *, exits: bool = True) -> AsyncIterator[ServedOutput]:
        """Asks many at once, within the limit; yields outputs as they end."""
        tasks = [asyncio.ensure_future(self.ask(request, exits=exits)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, run: _Run) -> str:
        if not self.config.chunk:
            return await self._retrying(run.attempts, partial(self._stream, run))
        run.restart()
        while (room := run.request.max_new_tokens - run.received) > 0:
            cap = min(self.config.chunk, room)
            part = await self._retrying(run.attempts, partial(self._chunk, run, cap))
            before = run.received
            if run.add(part, cap):
                return "contract"
            if part.finish_reason != "length" or run.received == before:
                return part.finish_reason or "unknown"
        return "length"

    async def _stream(self, run: _Run) -> str:
        """One streamed answer; the connection is closed when the block ends, whatever has come by then."""
        run.restart()
        body = self._body(run, run.request.max_new_tokens)
        run.calls = 1
        if self.config.count in ("usage", "continuous_usage"):
            continuous = {"continuous_usage_stats": True} if self.config.count == "continuous_usage" else {}
            body["stream_options"] = {"include_usage": True, **continuous}
        finish: str | None = None
        chat = self._client.chat.completions
        stream = await chat.create(model=run.model, messages=_chat(run.request), stream=True, extra_body=body)
        async with stream:
            async for chunk in stream:
                usage = None if chunk.usage is None else chunk.usage.completion_tokens
                choice = next(iter(chunk.choices or ()), None)
                part = None if choice is None else stream_part(choice)
                if run.read(part, usage):
                    return "contract"
                finish = (part and part.finish_reason) or finish or "unknown"
        if finish is None:
            raise BadReplyError("the stream is empty; is base_url that of an OpenAI-compatible server?")
        return finish

    async def _chunk(self, run: _Run, cap: int) -> Part:
        """A few tokens more: by token ids where the server has given them, else behind the text so far."""
        body = self._body(run, cap)
        if run.prompt_ids:
            body |= {"logprobs": 0, "skip_special_tokens": False}
            done = await self._client.completions.create(
                model=run.model, prompt=[*run.prompt_ids, *run.token_ids], extra_body=body
            )
            return text_part(done)
        messages = _chat(run.request)
        if text := run.reader.raw:
            messages.append({"role": "assistant", "content": text})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        reply = await self._client.chat.completions.create(model=run.model, messages=messages, extra_body=body)
        return chat_part(reply)

    def _body(self, run: _Run, cap: int) -> dict[str, object]:
        config = self.config
        seed = (config.seed + run.request.key + 1_000_003 * run.calls) % 2**31
        body: dict[str, object] = {**config.body, **run.request.body, "seed": seed}
        body |= {} if "max_completion_tokens" in body else {"max_tokens": cap}
        body |= {} if config.temperature is None else {"temperature": config.temperature}
        body |= {} if config.top_p is None else {"top_p": config.top_p}
        if config.count == "token_ids":
            body["return_token_ids"] = True
        if config.count == "logprobs" or (config.chunk and config.count == "token_ids"):
            body["logprobs"] = True
        return body

    async def _retrying(self, attempts: _Attempts, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call until it succeeds; what cannot succeed, or has failed too often, is raised."""
        failures = 0
        while True:
            attempts.count += 1
            try:
                return await call()
            except FAILURES as error:
                if failures == self.config.retries or not _worth_a_retry(error):
                    raise
                await asyncio.sleep(_wait(error, self.config.backoff_s * 2**failures))
                failures += 1


class _Attempts:
    """Calls made for a request."""

    count = 0


class _Run:
    """One request on its way."""

    def __init__(self, request: ChatRequest, *, model: str, exits: bool) -> None:
        self.request = request
        self.model = model
        self.attempts = _Attempts()
        self._exits = exits
        self._start = time.perf_counter()
        self._first: float | None = None
        self._ended: float | None = None
        self._lost = 0
        self._usage: int | None = None
        self._begin()

    def restart(self) -> None:
        """Drops what a broken attempt has left."""
        self._lost += self.received
        self._begin()

    def _begin(self) -> None:
        self.reader = AnswerReader(self.request.contract, starts_in_think=self.request.starts_in_think)
        self.calls = 0
        self.prompt_ids: tuple[int, ...] = ()
        self.token_ids: list[int] = []
        self._usage = None
        self._counted_by: CountedBy = "usage"

    @property
    def received(self) -> int:
        """Tokens received by this attempt."""
        counted = self.reader.tokens().received
        return counted if self._usage is None else max(counted, self._usage)

    def read(self, part: Part | None, usage: int | None) -> bool:
        """Reads a chunk of a stream, whose usage counts all so far; whether the request ends with it."""
        if part is not None:
            if usage is not None:
                tokens = max(0, usage - (self._usage or 0))
            else:
                tokens = part.tokens if part.tokens is not None else int(bool(part.reasoning or part.content))
                self._counted_by = part.counted_by if tokens else self._counted_by
            for piece in part.pieces(tokens):
                self._feed(piece)
        self._usage = self._usage if usage is None else usage
        return self._exits and self.reader.commit is not None

    def add(self, part: Part, cap: int) -> bool:
        """Reads the answer to a call; whether the request ends with it."""
        self.calls += 1
        if part.token_ids and part.prompt_ids and not self.prompt_ids:
            self.prompt_ids = part.prompt_ids
        self.token_ids.extend(part.token_ids)
        self._counted_by = part.counted_by if self.calls == 1 or part.counted_by == "chunks" else self._counted_by
        # Servers parse each call by itself: behind an answer, thinking without its start is answer, too.
        answering = self.reader.answering
        for piece in part.pieces(cap if part.tokens is None else part.tokens):
            self._feed(piece._replace(kind="content") if answering and piece.kind == "reasoning" else piece)
        return self._exits and self.reader.commit is not None

    def _feed(self, piece: Piece) -> None:
        if piece.text and self._first is None:
            self._first = time.perf_counter() - self._start
        if self.reader.read(piece) is not None and self._exits and self._ended is None:
            self._ended = time.perf_counter() - self._start

    def output(self, finish: str, error: str | None) -> ServedOutput:
        """What came of it."""
        seconds = time.perf_counter() - self._start if self._ended is None else self._ended
        commit = self.reader.close(truncated=finish != "stop")
        texts, tokens = self.reader.texts(), self.reader.tokens()
        # A usage that came at the very end counts better than what was added up.
        final = self.received != tokens.received and self._usage is not None
        return ServedOutput(
            key=self.request.key,
            text=texts.answer,
            thinking=texts.thinking,
            answer=None if commit is None else commit.answer,
            finish_reason=finish,
            tokens=self.received,
            kept_tokens=self.received if final and commit is None else tokens.kept,
            think_tokens=tokens.thought,
            counted_by=self._counted_by,
            seconds=seconds,
            first_token_s=self._first,
            calls=self.calls,
            attempts=self.attempts.count,
            lost_tokens=self._lost,
            error=error,
        )


def _chat(request: ChatRequest) -> list[ChatCompletionMessageParam]:
    messages = [{"role": message["role"], "content": message["content"]} for message in request.messages]
    return cast("list[ChatCompletionMessageParam]", messages)


def _worth_a_retry(error: Failure) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in _RETRIED or error.status_code >= 500
    return True


def _wait(error: Failure, seconds: float) -> float:
    """Seconds to wait: what the server asks for, else the given ones, somewhat spread out."""
    if isinstance(error, openai.APIStatusError):
        try:
            return min(_LONGEST_WAIT, max(0.0, float(error.response.headers.get("retry-after", ""))))
        except ValueError:
            pass  # none, or a date
    return min(_LONGEST_WAIT, seconds) * random.uniform(0.75, 1.0)


def _words(error: Failure) -> str:
    """An error in one line; a connection's cause says more than the error itself."""
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else None
    return " ".join(f"{error}{'' if cause is None else f' ({type(cause).__name__}: {cause})'}".split())

"""What servers send, as pieces: thinking in a channel of its own or not, tokens counted in one of several ways."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ace_learn.engines.answer_reader import CountedBy, Piece

if TYPE_CHECKING:
    from openai import BaseModel
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.chat.chat_completion import ChoiceLogprobs
    from openai.types.chat.chat_completion_chunk import Choice as Delta
    from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as DeltaLogprobs


class BadReplyError(Exception):
    """A reply that is no reply: a web page, an empty stream, nothing to choose from."""


def model_names(reply: object) -> list[str]:
    """The models that a server lists; read by hand, since the client's own reader of lists fails on a web page.

    Raises:
        BadReplyError: It lists none.
    """
    listed = reply.get("data") if isinstance(reply, dict) else None
    names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if not names:
        raise BadReplyError("the reply lists no models")
    return [str(name) for name in names]


class Part(NamedTuple):
    """What came together: a chunk of a stream, or the answer to a call that was not streamed."""

    reasoning: str
    content: str
    finish_reason: str | None
    tokens: int | None
    """Of this part alone; None where the server does not count."""
    counted_by: CountedBy
    token_texts: tuple[bytes, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    raw: bool = False
    """The content is raw text, think markers and all."""

    def pieces(self, tokens: int) -> Iterator[Piece]:
        """Thinking, then answer; the tokens are shared out by the characters."""
        thought = math.ceil(tokens * len(self.reasoning) / max(1, len(self.reasoning) + len(self.content)))
        if self.reasoning:
            yield Piece(self.reasoning, thought, "reasoning")
        yield Piece(self.content, tokens - thought, "raw" if self.raw else "content", self.token_texts)


def stream_part(choice: Delta) -> Part:
    """A chunk of a stream; a usage that comes with it counts better."""
    ids, texts = _ids(choice, "token_ids"), _texts(choice.logprobs)
    tokens, counted_by = _best_count(None, ids, texts)
    return Part(
        reasoning=_thinking(choice.delta),
        content=choice.delta.content or "",
        finish_reason=choice.finish_reason,
        tokens=tokens,
        counted_by=counted_by,
        token_texts=texts,
    )


def chat_part(reply: ChatCompletion) -> Part:
    """The answer to a chat call.

    Raises:
        BadReplyError: There is none in it.
    """
    _require_choices(reply)
    choice = reply.choices[0]
    ids, texts = _ids(choice, "token_ids"), _texts(choice.logprobs)
    used = None if reply.usage is None else reply.usage.completion_tokens
    tokens, counted_by = _best_count(used, ids, texts)
    return Part(
        reasoning=_thinking(choice.message),
        content=choice.message.content or "",
        finish_reason=choice.finish_reason,
        tokens=tokens,
        counted_by=counted_by,
        token_texts=texts,
        token_ids=ids,
        prompt_ids=_ids(reply, "prompt_token_ids"),
    )


def text_part(done: Completion) -> Part:
    """The answer to a call that went on behind token ids.

    Raises:
        BadReplyError: There is none in it.
    """
    _require_choices(done)
    choice = done.choices[0]
    listed = None if choice.logprobs is None else choice.logprobs.tokens
    ids, texts = _ids(choice, "token_ids"), tuple(token.encode() for token in listed or ())
    used = None if done.usage is None else done.usage.completion_tokens
    tokens, counted_by = _best_count(used, ids, texts)
    return Part(
        reasoning="",
        content=choice.text,
        finish_reason=choice.finish_reason,
        tokens=tokens,
        counted_by=counted_by,
        token_texts=texts,
        token_ids=ids,
        raw=True,
    )


def _require_choices(reply: object) -> None:
    """The client hands on whatever a server sends, as the text that it is."""
    if not getattr(reply, "choices", None):
        raise BadReplyError("the reply has no choices; is base_url that of an OpenAI-compatible server?")


def _best_count(usage: int | None, ids: tuple[int, ...], texts: tuple[bytes, ...]) -> tuple[int | None, CountedBy]:
    if usage is not None:
        return usage, "usage"
    if ids:
        return len(ids), "token_ids"
    return (len(texts), "logprobs") if texts else (None, "chunks")


def _thinking(model: BaseModel) -> str:
    """Thinking that the server sends apart; servers spell the field in two ways, some in both at once."""
    for name in ("reasoning_content", "reasoning"):
        value = _extra(model, name)
        if isinstance(value, str) and value:
            return value
    return ""


def _ids(model: BaseModel, name: str) -> tuple[int, ...]:
    value = _extra(model, name)
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, list) else ()


def _texts(logprobs: ChoiceLogprobs | DeltaLogprobs | None) -> tuple[bytes, ...]:
    listed = None if logprobs is None else logprobs.content
    return tuple(token.token.encode() if token.bytes is None else bytes(token.bytes) for token in listed or ())


def _extra(model: BaseModel, name: str) -> object:
    """A field that the API of OpenAI does not have."""
    value: object = (model.model_extra or {}).get(name)
    return value

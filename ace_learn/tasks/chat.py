"""From a chat to prompt tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from ace_learn.tasks.base import Message
from ace_learn.thinking import ThinkMarkers, opens_think

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    thinking: bool,
    markers: ThinkMarkers,
    plain: bool = False,
) -> list[int]:
    """The token ids that a model continues.

    With `thinking` off the prompt holds a closed think block: by the chat template where it knows `enable_thinking`,
    else by the marker's ids behind what the template gives.

    Args:
        tokenizer: The target's tokenizer.
        messages: The chat; its last turn is the user's.
        thinking: Whether the model may think.
        markers: The target's think markers.
        plain: For a tokenizer without chat template: the contents of all turns, each with a newline behind it.

    Raises:
        ValueError: The tokenizer has no chat template and `plain` is off, or has one and `plain` is on, or the template
            refuses the chat.
    """
    if (tokenizer.chat_template is None) != plain:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has a chat template; leave `plain` off"
            if plain
            else f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a chat model, give the tokenizer "
            "a template, or set `plain: true` to prompt with the bare text"
        )
    if any("\ud800" <= char <= "\udfff" for message in messages for char in message["content"]):
        raise ValueError("a message is not valid text (it holds lone surrogates); give it as UTF-8")
    if plain:
        text = "".join(f"{message['content']}\n" for message in messages)
        ids = list(tokenizer(text)["input_ids"])
        return ids if thinking else _close_think(ids, markers)
    ids = _apply_template(tokenizer, messages, thinking=thinking)
    if thinking or ids != _apply_template(tokenizer, messages, thinking=True):
        return ids
    return _close_think(ids, markers)


def _apply_template(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, thinking: bool) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(
            [{"role": message["role"], "content": message["content"]} for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            enable_thinking=thinking,
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a chat of the turns {roles}: {error}; "
            "change the chat (say, put a system turn's text into the user's), or the template"
        ) from error
    assert isinstance(ids, list), "return_dict=False gives the ids of one chat"
    return [token for token in ids if isinstance(token, int)]


def _close_think(ids: list[int], markers: ThinkMarkers) -> list[int]:
    """Appends an empty think block, or the end of the one that the prompt has opened."""
    return [*ids, *(() if opens_think(ids, markers) else markers.start), *markers.end]

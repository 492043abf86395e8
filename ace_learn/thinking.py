"""Think markers and paragraph boundaries, decided on token ids alone.

A *boundary* is a token of the think span that ends a paragraph: the text up to and including it ends in a blank line
(blank lines may hold spaces). What a token can do to a paragraph follows from its text, so four boolean tables over the
vocabulary replace any hand-written list of token strings, and a break may span several tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLANK_LINE_AT_END = re.compile(r"\n[^\S\n]*\n\s*\Z")
_NEWLINE_AT_END = re.compile(r"\n[^\S\n]*\Z")

TEXT, AFTER_NEWLINE, IN_BREAK = 0.0, 1.0, 2.0
"""Where the text stands: inside a line; after one newline; inside a paragraph break that has been counted."""


class ThinkMarkers(NamedTuple):
    """Token ids that open and close a think block, each a sequence of length >= 1."""

    start: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        *,
        start: str = "<think>",
        end: str = "</think>",
        multi_token: bool = False,
    ) -> ThinkMarkers:
        """Looks the markers up in a tokenizer.

        Args:
            tokenizer: The target's tokenizer.
            start: Text of the think start.
            end: Text of the think end.
            multi_token: Accept markers that are ordinary text, as the token sequence they encode to.

        Raises:
            ValueError: A marker is no token of its own and `multi_token` is off, or it encodes to nothing.
        """
        return cls(
            _marker_ids(tokenizer, start, multi_token=multi_token), _marker_ids(tokenizer, end, multi_token=multi_token)
        )


def _marker_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, multi_token: bool) -> tuple[int, ...]:
    token_id = tokenizer.get_vocab().get(text)
    if token_id is not None:
        return (token_id,)
    if not multi_token:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no think marker {text!r}. Name the model's own markers with "
            "--target.think.start and --target.think.end, or, if it writes them as plain text, set "
            "--target.think.multi_token true."
        )
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise ValueError(f"the think marker {text!r} encodes to no tokens; name another one with --target.think")
    return ids


class BoundaryTables(NamedTuple):
    """What each token's text does to a paragraph; four tables over the vocabulary.

    Attributes:
        breaks: The text holds a blank line and nothing but white space after it.
        ends_newline: The text ends with a newline (spaces may follow it).
        blank: The text is white space.
        newline: The text is white space that holds a newline.
    """

    breaks: Bool[Tensor, " V"]
    ends_newline: Bool[Tensor, " V"]
    blank: Bool[Tensor, " V"]
    newline: Bool[Tensor, " V"]

    @classmethod
    def from_texts(cls, texts: list[str]) -> BoundaryTables:
        """Builds the tables from each token's text, in token-id order."""
        blank = [text != "" and text.isspace() for text in texts]
        return cls(
            breaks=torch.tensor([bool(_BLANK_LINE_AT_END.search(text)) for text in texts]),
            ends_newline=torch.tensor([bool(_NEWLINE_AT_END.search(text)) for text in texts]),
            blank=torch.tensor(blank),
            newline=torch.tensor([is_blank and "\n" in text for is_blank, text in zip(blank, texts, strict=True)]),
        )

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> BoundaryTables:
        """Decodes every token by itself; ids beyond the tokenizer (padded embeddings) do nothing."""
        known = min(vocab_size, len(tokenizer))
        texts = tokenizer.batch_decode(
            [[i] for i in range(known)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cls.from_texts([*texts, *[""] * (vocab_size - known)])

    @property
    def sha256(self) -> str:
        """Hash of the tables; a head is bound to it, since its boundaries are."""
        digest = hashlib.sha256()
        for table in self:
            digest.update(table.to("cpu", torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> BoundaryTables:
        """The tables on a device."""
        return BoundaryTables(*(table.to(device) for table in self))

    def of(self, tokens: Int[Tensor, "*rows"]) -> BoundaryTables:
        """What the tables say of some tokens: fields of the tokens' shape."""
        return BoundaryTables(*(table[tokens] for table in self))

    def step(self, standing: Float[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """`advance`, for fields that are those of one token per row (`of`)."""
        after_one = standing == AFTER_NEWLINE
        continues = (standing == IN_BREAK) & self.blank
        closes = ~continues & (self.breaks | (after_one & self.newline))
        after_newline = self.ends_newline | (after_one & self.blank)
        moved = torch.where(after_newline, AFTER_NEWLINE, TEXT)
        return torch.where(continues | closes, IN_BREAK, moved), closes

    def advance(
        self, standing: Float[Tensor, " B"], token: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """One token further: the new standing (TEXT, AFTER_NEWLINE, IN_BREAK) and whether the token is a boundary.

        White space behind a boundary continues its break and is not a second boundary.
        """
        return self.of(token).step(standing)


class MarkerMatcher:
    """Recognises one marker in a stream of tokens, for a batch of streams, by a Knuth-Morris-Pratt automaton."""

    def __init__(self, marker: tuple[int, ...], vocab_size: int, device: torch.device) -> None:
        """Builds the automaton; `marker` holds at least one token id below `vocab_size`."""
        assert marker, "a marker has at least one token"
        alphabet = sorted(set(marker))
        self.length = len(marker)
        symbol = torch.zeros(vocab_size, dtype=torch.long)
        symbol[alphabet] = torch.arange(1, len(alphabet) + 1)
        self.symbol = symbol.to(device)
        self.transition = torch.tensor(
            [[_longest_match(marker, state, token) for token in [-1, *alphabet]] for state in range(self.length + 1)],
            dtype=torch.float32,
            device=device,
        )

    def advance(self, matched: Float[Tensor, " B"], token: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Tokens of the marker matched after `token`, given those matched before it; `length` means complete."""
        return self.step(matched, self.symbol[token])

    def step(self, matched: Float[Tensor, " B"], symbol: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """`advance`, for a token whose `symbol` was looked up."""
        return self.transition[matched.long(), symbol]


def _longest_match(marker: tuple[int, ...], state: int, token: int) -> int:
    """Length of the longest prefix of the marker that ends the text `marker[:state] + token`."""
    text = (*marker[:state], token)
    return next(n for n in range(min(len(marker), len(text)), -1, -1) if marker[:n] == text[len(text) - n :])


_TEMPLATE_TAIL = 2
"""Tokens of white space that a chat template may put behind the think start that it opens, or the think end."""


def opens_think(ids: Sequence[int], markers: ThinkMarkers) -> bool:
    """Whether a prompt ends inside a think block that its template opened.

    A start marker further up was written by the user, and opens nothing.
    """
    tail = _tail(ids, markers)
    opened = _last_occurrence(tail, markers.start)
    at_the_end = opened >= 0 and len(tail) - opened - len(markers.start) <= _TEMPLATE_TAIL
    return at_the_end and opened > _last_occurrence(tail, markers.end)


def closes_think(ids: Sequence[int], markers: ThinkMarkers) -> bool:
    """Whether a prompt ends behind a think block that its template closed: thinking is disabled.

    A block further up is of an earlier turn, and disables nothing.
    """
    tail = _tail(ids, markers)
    closed = _last_occurrence(tail, markers.end)
    return closed >= 0 and len(tail) - closed - len(markers.end) <= _TEMPLATE_TAIL


def _tail(ids: Sequence[int], markers: ThinkMarkers) -> Sequence[int]:
    """All of a prompt that can matter: a marker behind one at the very end, so that long prompts cost no search."""
    return ids[-(len(markers.start) + len(markers.end) + _TEMPLATE_TAIL) :]


def _last_occurrence(ids: Sequence[int], marker: tuple[int, ...]) -> int:
    width = len(marker)
    return next((i for i in range(len(ids) - width, -1, -1) if tuple(ids[i : i + width]) == marker), -1)

"""What a contract is: a legal answer space, a streaming acceptor, a projection, an equality.

A contract C = (V, A, pi, valid, commit) commits to an answer such that no continuation changes it:
pi(y + z) = pi(y) once committed. `Commit.end` is the character offset after the delimiter that
encloses the answer (brace, bracket of "(B)", closing tag, patch fence), else after its last
character, though it may be decided later.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

from ace_learn.contracts.committer import Commit, Committer, Markers
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

Scope: TypeAlias = Literal["answer", "anywhere"]


class Common(NamedTuple):
    """The spec keys that every kind has."""

    scope: Scope
    think_start: str
    think_end: str


@dataclass(frozen=True, kw_only=True)
class Contract(ABC):
    """An output contract. Frozen and hashable; a committer holds the state of one text."""

    kind: ClassVar[str]
    lookback: ClassVar[int] = 0
    looks_ahead: ClassVar[bool] = True
    """Whether an answer may be settled by text behind its end."""

    scope: Scope = "answer"
    """"answer" skips think spans, "anywhere" reads them like any other text."""
    think_start: str = "<think>"
    think_end: str = "</think>"

    def __post_init__(self) -> None:
        """Refuse markers that cannot be told apart."""
        if self.scope not in ("answer", "anywhere"):
            raise ValueError(f'scope is {self.scope!r}; write "answer" or "anywhere"')
        if self.think_start in self.think_end or self.think_end in self.think_start:
            # This refuses empty ones, too: the empty string is part of any string.
            raise ValueError("think_start and think_end must not be part of one another")

    @staticmethod
    def from_spec(spec: Mapping[str, JSON] | str) -> Contract:
        """Build a contract from its spec.

        Args:
            spec: E.g. `{"kind": "integer", "minimum": 0, "maximum": 999}`, or that as JSON text.

        Raises:
            ValueError: Unknown kind or key, or a value of the wrong type; says what is allowed.
        """
        # The table lists the subclasses, which import this module.
        from ace_learn.contracts.kinds import KINDS

        fields = Fields.of(spec)
        kind = fields.string("kind")
        if kind not in KINDS:
            raise ValueError(f"unknown contract kind {kind!r}; known kinds: {', '.join(KINDS)}")
        contract = KINDS[kind].from_fields(fields)
        fields.finish()
        return contract

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from the spec's keys, `kind` excepted."""

    def to_spec(self) -> dict[str, JSON]:
        """The spec that :meth:`from_spec` turns into an equal contract."""
        spec: dict[str, JSON] = {"kind": self.kind, **self.own_fields()}
        if self.scope != "answer":
            spec["scope"] = self.scope
        if (self.think_start, self.think_end) != ("<think>", "</think>"):
            spec["think_start"] = self.think_start
            spec["think_end"] = self.think_end
        return spec

    @abstractmethod
    def own_fields(self) -> dict[str, JSON]:
        """The spec keys of this kind; keys at their default may be left out."""

    @abstractmethod
    def scan(self, source: Source) -> Step[Commit | None]:
        """Read `source` until an answer is settled; None if the text ends without one."""

    @abstractmethod
    def valid(self, answer: JSON) -> bool:
        """Whether `answer` is in the legal answer space."""

    @abstractmethod
    def same(self, a: JSON, b: JSON) -> bool:
        """Whether two present answers mean the same."""

    @abstractmethod
    def instruction(self) -> str:
        """The sentence that asks for this contract in a prompt."""

    def equal(self, a: JSON | None, b: JSON | None) -> bool:
        """Whether two answers mean the same; an absent one (None) equals nothing, not even None."""
        return a is not None and b is not None and self.same(a, b)

    def committer(self, *, starts_in_think: bool = False) -> Committer:
        """A fresh streaming acceptor.

        Args:
            starts_in_think: The prompt's template has opened the think span.
        """
        markers = None
        if self.scope == "answer":
            markers = Markers(self.think_start, self.think_end)
        return Committer(
            self.scan,
            markers=markers,
            in_think=starts_in_think,
            lookback=self.lookback,
            looks_ahead=self.looks_ahead,
        )

    def in_prose(self) -> Contract:
        """The contract that reads a paragraph of thinking as a text of its own, by rules that take next to no time."""
        return replace(self, scope="anywhere")

    def project(self, text: str, *, truncated: bool = False, starts_in_think: bool = False) -> Commit | None:
        """The answer of a whole text: a committer fed with it and closed.

        Args:
            text: The generated text.
            truncated: It was cut by length, so its end settles nothing.
            starts_in_think: The prompt's template has opened the think span.
        """
        committer = self.committer(starts_in_think=starts_in_think)
        committer.feed(text)
        return committer.close(truncated=truncated)


def common_fields(fields: Fields) -> Common:
    """Read the spec keys that every kind has."""
    scope = fields.string("scope", default="answer")
    if scope not in ("answer", "anywhere"):
        raise ValueError(f'contract key "scope" is {scope!r}; write "answer" or "anywhere"')
    return Common(
        scope="answer" if scope == "answer" else "anywhere",
        think_start=fields.string("think_start", default="<think>"),
        think_end=fields.string("think_end", default="</think>"),
    )


def json_equal(a: JSON, b: JSON) -> bool:
    """JSON Schema's equality: 1 equals 1.0, true does not equal 1, key order is irrelevant."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(json_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(json_equal, a, b))
    return a == b


def quoted(text: str) -> str:
    """`text` as a JSON string, for messages."""
    return json.dumps(text, ensure_ascii=False)

"""One of a few labels behind a cue: "Sentiment: negative"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.candidates import first_answer
from ace_learn.contracts.choice import option_behind_cue
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.cues import LOOKBACK, Cues, Trigger, check_cues
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.options import Options, check_options
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

DEFAULT_CUES = ("label", "class", "category", "sentiment", "answer")
"""Each needs ":" or "is" behind it."""


class _Compiled(NamedTuple):
    options: Options
    cues: Cues


@dataclass(frozen=True, kw_only=True)
class Label(Contract):
    """The answer is one of `labels`, spelt as there; a box counts for nothing."""

    kind: ClassVar[str] = "label"
    lookback: ClassVar[int] = LOOKBACK

    labels: tuple[str, ...]
    cues: tuple[str, ...] = DEFAULT_CUES
    """What announces the label; replaces the default cues."""

    def __post_init__(self) -> None:
        """Refuse labels and cues that cannot work."""
        super().__post_init__()
        check_options("labels", self.labels)
        check_cues(self.cues)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        labels = fields.strings("labels")
        cues = fields.strings("cues", default=DEFAULT_CUES)
        return cls(labels=labels, cues=cues, **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The labels, and the cues if they are not the default ones."""
        spec: dict[str, JSON] = {"labels": list(self.labels)}
        if self.cues != DEFAULT_CUES:
            spec["cues"] = list(self.cues)
        return spec

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until a cue gives a label."""
        options, cues = _compiled(self.labels, self.cues)

        def behind_cue(source: Source, trigger: Trigger) -> Step[Commit | None]:
            return (yield from option_behind_cue(source, trigger, options, ()))

        return (yield from first_answer(source, cues, options.read_whole, behind_cue, self.valid))

    def valid(self, answer: JSON) -> bool:
        """One of the labels, as spelt there."""
        return isinstance(answer, str) and answer in self.labels

    def same(self, a: JSON, b: JSON) -> bool:
        """The same label, in any case if that is clear."""
        if not isinstance(a, str) or not isinstance(b, str):
            return False
        options = _compiled(self.labels, self.cues).options
        label = options.canonical(a)
        return label is not None and label == options.canonical(b)

    def instruction(self) -> str:
        """The sentence for the prompt."""
        cue = self.cues[0].rstrip(":").capitalize()
        return f'End with the line "{cue}: X", where X is one of: {", ".join(self.labels)}.'


@lru_cache(maxsize=256)
def _compiled(labels: tuple[str, ...], cues: tuple[str, ...]) -> _Compiled:
    return _Compiled(Options(labels), Cues(cues, boxes=False))

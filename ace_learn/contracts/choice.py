r"""One of a few options: behind a cue ("The answer is (B)") or in a box (`\boxed{B}`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

from ace_learn.contracts.base import Contract, common_fields
from ace_learn.contracts.candidates import first_answer
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.cues import LOOKBACK, Cues, Trigger, check_cues
from ace_learn.contracts.dress import read_closers, read_dress
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.follow import option_stands
from ace_learn.contracts.options import Options, check_options
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON

DEFAULT_CUES = ("answer", "answer is", "correct option is", "correct choice is")
"""A single word needs ":" or "is" behind it ("correct answer is" is the cue "answer")."""

_NOUNS = ("option", "choice", "letter", "answer")


class _Compiled(NamedTuple):
    options: Options
    cues: Cues


@dataclass(frozen=True, kw_only=True)
class Choice(Contract):
    """The answer is one of `options`, spelt as there."""

    kind: ClassVar[str] = "choice"
    lookback: ClassVar[int] = LOOKBACK

    options: tuple[str, ...]
    cues: tuple[str, ...] = DEFAULT_CUES
    """What announces the answer; replaces the default cues, a box counts in any case."""

    def __post_init__(self) -> None:
        """Refuse options and cues that cannot work."""
        super().__post_init__()
        check_options("options", self.options)
        check_cues(self.cues)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        options = fields.strings("options")
        cues = fields.strings("cues", default=DEFAULT_CUES)
        return cls(options=options, cues=cues, **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The options, and the cues if they are not the default ones."""
        spec: dict[str, JSON] = {"options": list(self.options)}
        if self.cues != DEFAULT_CUES:
            spec["cues"] = list(self.cues)
        return spec

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until a cue or a box gives an option."""
        options, cues = _compiled(self.options, self.cues)

        def behind_cue(source: Source, trigger: Trigger) -> Step[Commit | None]:
            return (yield from option_behind_cue(source, trigger, options, _NOUNS))

        return (yield from first_answer(source, cues, options.read_whole, behind_cue, self.valid))

    def valid(self, answer: JSON) -> bool:
        """One of the options, as spelt there."""
        return isinstance(answer, str) and answer in self.options

    def same(self, a: JSON, b: JSON) -> bool:
        """The same option, in any case if that is clear."""
        if not isinstance(a, str) or not isinstance(b, str):
            return False
        options = _compiled(self.options, self.cues).options
        option = options.canonical(a)
        return option is not None and option == options.canonical(b)

    def instruction(self) -> str:
        """The sentence for the prompt."""
        cue = "Answer" if self.cues == DEFAULT_CUES else self.cues[0].rstrip(":")
        return f'End with the line "{cue}: X", where X is one of: {", ".join(self.options)}.'


def option_behind_cue(
    source: Source, trigger: Trigger, options: Options, nouns: tuple[str, ...]
) -> Step[Commit | None]:
    """Read the option behind a cue, and on until it is settled."""
    dress = yield from read_dress(source, trigger, nouns)
    if dress is None:
        return None
    option = yield from options.read(source, loose=dress.bracketed)
    if option is None:
        return None
    end = yield from read_closers(source, dress)
    if end is None or not (yield from option_stands(source, option, options.another)):
        return None
    return Commit(option, end)


@lru_cache(maxsize=256)
def _compiled(options: tuple[str, ...], cues: tuple[str, ...]) -> _Compiled:
    return _Compiled(Options(options), Cues(cues, boxes=True))

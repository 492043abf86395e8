"""The loop that cue-based contracts share: try every trigger in order, take the first answer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ace_learn.contracts.boxes import read_box
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.cues import Cues, Trigger
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON


@runtime_checkable
class BoxReader(Protocol):
    """Reads the answer that the content of a box spells."""

    def __call__(self, content: Source, /) -> Step[str | None]:
        """Read it; None if the content is something else."""


@runtime_checkable
class CueReader(Protocol):
    """Reads the answer behind a cue."""

    def __call__(self, source: Source, trigger: Trigger, /) -> Step[Commit | None]:
        """Read it, and on until it is settled; None if there is none."""


@runtime_checkable
class Legal(Protocol):
    """Whether an answer is in the legal answer space."""

    def __call__(self, answer: JSON, /) -> bool:
        """Decide."""


def first_answer(
    source: Source, cues: Cues, in_box: BoxReader, behind_cue: CueReader, legal: Legal
) -> Step[Commit | None]:
    """Read until a trigger gives a legal answer.

    Triggers are judged one after the other, each by the text around it alone; one that gives no
    answer is forgotten and the search goes on right behind it.
    """
    while (trigger := (yield from cues.find(source))) is not None:
        if trigger.vetoed:
            continue
        source.mark()
        found: Commit | None
        if trigger.box:
            content = yield from read_box(source)
            answer = None if content is None else (yield from in_box(Source.whole(content)))
            found = None if answer is None else Commit(answer, source.offset)
        else:
            found = yield from behind_cue(source, trigger)
        if found is not None and legal(found.answer):
            return found
        source.rewind()
    return None

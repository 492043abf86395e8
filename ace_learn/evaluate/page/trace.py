"""How a trace view is laid out: bars on a common scale, and where the exit stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ace_learn.evaluate.page.sections import TraceParagraph, TraceView
from ace_learn.evaluate.page.text import shortened


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One signal at one boundary.

    Attributes:
        name: the signal.
        value: its value in words.
        width: length of the bar, percent of its track.
        bound: where the exit rule's bound stands, percent; None: it has none.
    """

    name: str
    value: str
    width: str
    bound: str | None


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One paragraph as it is shown.

    Attributes:
        text: the paragraph, cut where it is endless.
        bars: its signals; none where no boundary closes it.
        matches: exiting there would have kept the answer.
        answer: the answer that exiting there gives.
        after: it would only have been thought without the exit.
        exits: thinking ends behind it.
    """

    text: str
    bars: tuple[Bar, ...]
    matches: bool
    answer: str | None
    after: bool
    exits: bool


def trace_rows(view: TraceView) -> tuple[TraceRow, ...]:
    """The paragraphs of a view with their bars."""
    tops = {name: _top(view, name) for paragraph in view.paragraphs[:1] for name in paragraph.signals}
    last = len(view.paragraphs) - 1
    return tuple(
        TraceRow(
            text=shortened(paragraph.text.strip("\n")),
            bars=tuple(_bar(view, paragraph, name, tops[name]) for name in paragraph.signals),
            matches=paragraph.matches,
            answer=None if paragraph.answer is None else shortened(paragraph.answer, 200),
            after=view.exits_early and place > view.exit_index,
            exits=place == (view.exit_index if view.exits_early else last),
        )
        for place, paragraph in enumerate(view.paragraphs)
    )


def _top(view: TraceView, name: str) -> float:
    """What a full bar of a signal stands for: 1 where all values are shares, else the largest value of the trace."""
    values = [paragraph.signals[name] for paragraph in view.paragraphs if paragraph.closed]
    return max([1.0, view.bounds.get(name, 0.0), *(value for value in values if math.isfinite(value))])


def _bar(view: TraceView, paragraph: TraceParagraph, name: str, top: float) -> Bar:
    value = paragraph.signals[name]
    bound = view.bounds.get(name)
    return Bar(
        name=name,
        value=_words(value, top),
        width=_percent(value, top),
        bound=None if bound is None else _percent(bound, top),
    )


def _words(value: float, top: float) -> str:
    if not math.isfinite(value):
        return "n/a"
    return f"{value:.2f}" if top <= 10 else f"{value:.0f}"


def _percent(value: float, top: float) -> str:
    share = value / top if math.isfinite(value) else 0.0
    return f"{100 * min(1.0, max(0.0, share)):.1f}%"


def signal_names(rows: Sequence[TraceRow]) -> tuple[str, ...]:
    """Names of the signals shown, in order."""
    return tuple(bar.name for bar in rows[0].bars) if rows else ()

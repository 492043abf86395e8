"""What a report page is made of. All text is plain text: the renderer escapes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Paragraphs under a heading.

    Attributes:
        heading: heading of the section.
        paragraphs: their texts.
    """

    heading: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One figure that the reader is to take away.

    Attributes:
        label: what it is.
        value: the figure, with its unit.
        detail: what it is compared with, or its interval.
    """

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A few figures in large type."""

    heading: str
    items: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell with a second, smaller line, such as an interval."""

    text: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; its first column names the rows, columns of numbers are aligned to the right.

    Attributes:
        heading: heading of the section and name of the table.
        columns: column heads.
        rows: cells, plain texts or `Cell`, as many in each row as there are columns.
        note: how to read it.
        highlight: names of the rows that stand out, as in their first cell.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""
    highlight: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the shape.

        Raises:
            ValueError: no columns, or a row with more or fewer cells.
        """
        if not self.columns:
            raise ValueError(f"table {self.heading!r} has no columns; name at least one")
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {number} of table {self.heading!r} has {len(row)} cells for {len(self.columns)} columns"
                )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        heading: heading of the section.
        svg: one SVG document, from a function of `figures`.
        caption: what it shows and how to read it.
        alt: the figure in words for those who do not see it; the heading where there is none.
    """

    heading: str
    svg: str
    caption: str = ""
    alt: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceParagraph:
    """One paragraph of the thinking.

    Attributes:
        text: the model's own text.
        signals: value of each signal at the boundary that closes the paragraph; the same names in each.
        matches: exiting there would have kept the full answer.
        answer: the answer that exiting there gives; None where there is none.
        closed: a boundary closes the paragraph. Only the last may be open, up to the natural end of thinking; then
            it has no signals, and `matches` and `answer` are those of the full run.
    """

    text: str
    signals: Mapping[str, float] = field(default_factory=dict)
    matches: bool
    answer: str | None = None
    closed: bool = True


@dataclass(frozen=True, kw_only=True)
class TraceView:
    """A trace with its signals, the exit, and what would have been thought further.

    Attributes:
        heading: heading of the section.
        prompt: the problem as the model got it.
        paragraphs: the whole thinking of the full run.
        exit_index: index of the boundary at which thinking ends; the number of closed paragraphs is the natural end.
        full_answer: answer of the full run; None where there is none.
        early_answer: answer of the run that exits; None where there is none.
        note: one sentence on what the example shows.
        bounds: where signals have a bound in the exit rule, that bound; it is marked on their bars.
        gold: the right answer, where it is known and of interest.
    """

    heading: str
    prompt: str
    paragraphs: tuple[TraceParagraph, ...]
    exit_index: int
    full_answer: str | None
    early_answer: str | None
    note: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    gold: str | None = None

    def __post_init__(self) -> None:
        """Checks that the exit and the signals belong to the paragraphs.

        Raises:
            ValueError: an exit outside the trace, an open paragraph before the last, or signals that differ.
        """
        closed = [paragraph for paragraph in self.paragraphs if paragraph.closed]
        if not 0 <= self.exit_index <= len(closed):
            raise ValueError(f"exit_index {self.exit_index} lies outside 0..{len(closed)}, the trace's paragraph ends")
        if any(not paragraph.closed for paragraph in self.paragraphs[:-1]):
            raise ValueError("only the last paragraph of a trace may be open")
        names = {tuple(paragraph.signals) for paragraph in closed}
        if len(names) > 1:
            raise ValueError(f"the paragraphs of a trace have different signals: {sorted(names)}; give each the same")
        unknown = [name for name in self.bounds if closed and name not in closed[0].signals]
        if unknown or not all(map(math.isfinite, self.bounds.values())):
            raise ValueError(f"bounds must be finite and of signals of the trace, not {dict(self.bounds)}")

    @property
    def exits_early(self) -> bool:
        """Whether thinking ends at a boundary, and not by itself."""
        return self.exit_index < sum(paragraph.closed for paragraph in self.paragraphs)

    @property
    def keeps_answer(self) -> bool:
        """Whether the run that exits gives the full run's answer."""
        if self.exits_early:
            return self.paragraphs[self.exit_index].matches
        return self.full_answer is not None


@dataclass(frozen=True, kw_only=True)
class Collapsible:
    """Sections that are folded up until the reader opens them; on paper they are open.

    Attributes:
        heading: heading, always shown.
        intro: paragraphs in front of the sections.
        sections: what it holds.
        opened: whether it starts open.
    """

    heading: str
    intro: tuple[str, ...] = ()
    sections: tuple[Section, ...]
    opened: bool = False


Section: TypeAlias = Prose | Facts | Table | Figure | TraceView | Collapsible


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: title of the document and of the page.
        intro: paragraphs in front of the first section.
        sections: the sections in order.
    """

    title: str
    intro: tuple[str, ...] = ()
    sections: tuple[Section, ...]

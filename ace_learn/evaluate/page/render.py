"""From a page to one HTML file."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ace_learn.artifacts import write_text
from ace_learn.evaluate.page.sections import (
    Cell,
    Collapsible,
    Facts,
    Figure,
    Page,
    Prose,
    Section,
    Table,
    TraceView,
)
from ace_learn.evaluate.page.svg import embedded
from ace_learn.evaluate.page.text import clean
from ace_learn.evaluate.page.trace import signal_names, trace_rows
from ace_learn.evaluate.style import PALETTE

_PACKAGE = "ace_learn.evaluate.page"
_NUMBER = re.compile(r"[+\-\u2212]?[\d.,\s]*\d[\d.,]*\s*(%|s|ms|x|points|tokens)?|n/a|-|\u2013|")


def write_page(path: Path, page: Page) -> None:
    """Write a page as one self-contained HTML file, atomically.

    Args:
        path: the file.
        page: what it shows.

    Raises:
        ValueError: a figure is no SVG that may stand in a page.
        OSError: the file cannot be written.
    """
    write_text(path, render_page(page))


def render_page(page: Page) -> str:
    """The HTML of a page; the same page gives the same text.

    Raises:
        ValueError: a figure is no SVG that may stand in a page.
    """
    renderer = _Renderer()
    body = [renderer.section(section, level=2) for section in page.sections]
    return str(renderer.fill("page", page=page, body=body, contents=renderer.contents, style=_style()))


class _Renderer:
    """Fills the templates of one page and numbers its sections."""

    def __init__(self) -> None:
        self.contents: list[tuple[str, str]] = []
        self._count = 0

    def fill(self, template: str, **context: object) -> Markup:
        """One template with its context; every text in it is escaped."""
        return Markup(_environment().get_template(f"{template}.html.jinja").render(context))  # autoescaped

    def section(self, section: Section, *, level: int) -> Markup:
        """A section with the sections in it; level is that of its heading."""
        self._count += 1
        key = f"s{self._count}"
        if level == 2:
            self.contents.append((key, section.heading))
        common: dict[str, object] = {"section": section, "key": key, "level": min(level, 6)}
        match section:
            case Prose():
                return self.fill("prose", **common)
            case Facts():
                return self.fill("facts", **common)
            case Table():
                return self.fill("table", **common, rows=_cells(section), numeric=_numeric(section))
            case Figure():
                label = section.alt or section.heading
                return self.fill("figure", **common, svg=Markup(embedded(section.svg, prefix=f"{key}-", label=label)))
            case TraceView():
                rows = trace_rows(section)
                return self.fill("trace", **common, rows=rows, names=signal_names(rows))
            case Collapsible():
                inner = [self.section(part, level=level + 1) for part in section.sections]
                return self.fill("collapsible", **common, inner=inner)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader(_PACKAGE, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )


def _finalize(value: object) -> object:
    """What a template prints: text is cleaned, then escaped; markup has been through this already."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _style() -> Markup:
    """The style sheet, with the palette in both schemes."""
    light = "".join(f"--c-{colour.name}:{colour.light};" for colour in PALETTE)
    dark = "".join(f"--c-{colour.name}:{colour.dark};" for colour in PALETTE)
    sheet = (files(_PACKAGE) / "templates" / "page.css").read_text(encoding="utf-8")
    return Markup(
        f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{sheet}"
    )  # ours alone: no text of a page enters it


def _cells(table: Table) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(cell if isinstance(cell, Cell) else Cell(text=cell) for cell in row) for row in table.rows)


def _numeric(table: Table) -> tuple[bool, ...]:
    """Which columns hold numbers alone."""
    columns = list(zip(*_cells(table), strict=True)) or [()] * len(table.columns)
    return tuple(
        place > 0 and bool(cells) and all(_NUMBER.fullmatch(cell.text) for cell in cells)
        for place, cells in enumerate(columns)
    )

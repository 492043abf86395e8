"""Report pages: one self-contained HTML file with tables, figures and traces, readable on a phone and on paper.

A page is a `Page` of sections (`Prose`, `Facts`, `Table`, `Figure`, `TraceView`, `Collapsible`); `write_page` writes
one. The functions that end in `_svg` draw figures for it. Nothing is fetched when the page is read, no script runs, and
the same content gives the same bytes.
"""

from ace_learn.evaluate.page.figures import Line, Point, bars_svg, pareto_svg, reliability_svg, training_curves_svg
from ace_learn.evaluate.page.reliability import Reliability, reliability, wilson_interval
from ace_learn.evaluate.page.render import render_page, write_page
from ace_learn.evaluate.page.sections import (
    Cell,
    Collapsible,
    Fact,
    Facts,
    Figure,
    Page,
    Prose,
    Section,
    Table,
    TraceParagraph,
    TraceView,
)

__all__ = [
    "Page",
    "Section",
    "Prose",
    "Fact",
    "Facts",
    "Cell",
    "Table",
    "Figure",
    "TraceParagraph",
    "TraceView",
    "Collapsible",
    "render_page",
    "write_page",
    "Line",
    "Point",
    "pareto_svg",
    "bars_svg",
    "training_curves_svg",
    "reliability_svg",
    "Reliability",
    "reliability",
    "wilson_interval",
]

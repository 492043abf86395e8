"""From a matplotlib figure to an SVG element that can stand inside an HTML page.

Figures are drawn in the light shades of `style.PALETTE`. In the SVG each shade becomes the CSS variable of its colour,
so that the page decides; text stays text, in the font of the page; nothing has an id that is not referred to.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ace_learn.evaluate.page.text import clean
from ace_learn.evaluate.style import GRID, INK, MUTED, PALETTE

WIDTH = 360
"""Width of every figure in user units: about a phone's in pixels, so that text of 12 units stays legible there."""

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_FORBIDDEN = ("script", "style", "foreignObject", "iframe", "image", "a", "animate", "set", "metadata")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_VARIABLES = {colour.light: f"var(--c-{colour.name}, {colour.light})" for colour in PALETTE}
_SHADE = re.compile("|".join(_VARIABLES))


@contextmanager
def drawing(height: float, *, ratios: Sequence[float] = (1,)) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of the page's width; draw into it and call `to_svg` inside the block.

    Args:
        height: height in user units, with titles and legends.
        ratios: relative heights of its panels, from top to bottom; they share the horizontal axis.
    """
    with _settings(), warnings.catch_warnings():
        # The font only measures: the reader's browser picks one that has the characters.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        panels = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
        for axes in panels:
            axes.grid(linewidth=0.8)
        yield figure, panels


def _settings() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "ace_learn",
            "text.parse_math": False,
            "font.size": 12,
            "axes.titlesize": 12,
            "axes.labelsize": 12,
            "xtick.labelsize": 11,
            "ytick.labelsize": 11,
            "legend.fontsize": 11,
            "text.color": INK.light,
            "axes.labelcolor": INK.light,
            "axes.edgecolor": MUTED.light,
            "xtick.color": MUTED.light,
            "ytick.color": MUTED.light,
            "xtick.labelcolor": INK.light,
            "ytick.labelcolor": INK.light,
            "grid.color": GRID.light,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.unicode_minus": True,
            "legend.frameon": False,
        }
    )


def to_svg(figure: Figure) -> str:
    """The figure as one `<svg>` element."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    _drop(root)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("stroke-linejoin", "round")
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _style(element.get("style", ""), text=element.tag == f"{_SVG}text"))
        if _HREF in element.attrib:
            element.set("href", element.attrib.pop(_HREF))
    return _serialise(root)


def embedded(svg: str, *, prefix: str, label: str) -> str:
    """An SVG for one place in a page: its ids are the page's own, and it has a name.

    Args:
        svg: an `<svg>` document without a document type.
        prefix: what its ids begin with.
        label: what it shows, for those who do not see it.

    Raises:
        ValueError: it is no SVG, or it holds what a self-contained page must not: scripts, links, style sheets, events.
    """
    if "<!" in svg:
        raise ValueError("an SVG for a page has no document type, comments or CDATA; take those of `page.figures`")
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"a figure of the page is no SVG document: {error}") from error
    if root.tag != f"{_SVG}svg":
        raise ValueError(f"a figure of the page is a <{root.tag}> and no <svg>; take those of `page.figures`")
    _refuse_active(root)
    wanted = _referenced(root)
    for element in root.iter():
        identifier = element.attrib.pop("id", None)
        if identifier in wanted:
            element.set("id", f"{prefix}{identifier}")
        for name, value in element.attrib.items():
            if name == "href":
                element.set(name, f"#{prefix}{value[1:]}")
            else:
                element.set(name, _REFERENCE.sub(rf"url(#{prefix}\1)", value))
    root.set("role", "img")
    root.set("aria-label", clean(label))
    return _serialise(root)


def _drop(root: ElementTree.Element) -> None:
    """Removes the metadata and the style sheet, which would rule the whole page."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)


def _style(style: str, *, text: bool) -> str:
    """A style with the palette's variables; of a font, size and weight stay."""
    if text:
        style = re.sub(r"font: ([\w\d. ]*?)([\d.]+)px [^;]*", r"font-size: \2px", style)
    return _SHADE.sub(lambda found: _VARIABLES[found[0]], style)


def _refuse_active(root: ElementTree.Element) -> None:
    for element in root.iter():
        name = element.tag.rpartition("}")[2]
        handlers = [key for key in element.attrib if key.lower().startswith("on")]
        links = [
            value
            for key, value in element.attrib.items()
            if key.rpartition("}")[2] in ("href", "src") and (key != "href" or not value.startswith("#"))
        ]
        styles = [value for value in element.attrib.values() if re.search(r"url\((?!#)|@import", value)]
        if name in _FORBIDDEN or handlers or links or styles:
            what = [*handlers, *links, *styles] or [name]
            raise ValueError(f"a figure of the page holds {what[0][:60]!r}, which a self-contained page must not")


def _referenced(root: ElementTree.Element) -> set[str]:
    values = [value for element in root.iter() for value in element.attrib.values()]
    links = [element.get("href", "#")[1:] for element in root.iter()]
    return {name for value in values for name in _REFERENCE.findall(value)} | set(links)


def _serialise(root: ElementTree.Element) -> str:
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.tail = None if not (element.tail or "").strip() else element.tail
    root.set("xmlns", "http://www.w3.org/2000/svg")
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)

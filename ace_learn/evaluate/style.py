"""How figures look: a palette that colour-blind readers can tell apart, each colour in a light and a dark shade."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Colour(NamedTuple):
    """One colour of the palette.

    Attributes:
        name: its CSS variable is `--c-NAME`.
        light: shade on a light ground, in which figures are drawn.
        dark: shade on a dark ground.
    """

    name: str
    light: str
    dark: str


INK = Colour("ink", "#1b1f24", "#e6edf3")
MUTED = Colour("muted", "#57606a", "#9aa4af")
GRID = Colour("grid", "#d4d9df", "#3a424c")
RED = Colour("red", "#b3261e", "#ff8a80")
BLUE = Colour("blue", "#0072b2", "#56b4e9")
ORANGE = Colour("orange", "#b35900", "#f0a33a")
GREEN = Colour("green", "#00805e", "#2fc79a")
PURPLE = Colour("purple", "#a6447f", "#e590c4")
GREY = Colour("grey", "#6e7781", "#8f99a3")
BROWN = Colour("brown", "#806600", "#d9c24a")
PALETTE = (INK, MUTED, GRID, RED, BLUE, ORANGE, GREEN, PURPLE, GREY, BROWN)
"""Every colour of a figure; no two share a light shade, so that the shade names the colour."""


Marker = Literal["*", "s", "^", "o", "v", "D", "P", "X"]


class Look(NamedTuple):
    """Colour and marker of a series; the marker alone tells series apart too."""

    colour: Colour
    marker: Marker


LOOKS: dict[str, Look] = {
    "learned": Look(BLUE, "*"),
    "budget": Look(ORANGE, "s"),
    "confidence": Look(PURPLE, "^"),
    "full": Look(INK, "o"),
    "no_think": Look(GREY, "v"),
    "oracle": Look(GREEN, "D"),
}
"""Looks of the methods that every report shows."""

_OTHERS = (
    Look(BLUE, "o"),
    Look(ORANGE, "s"),
    Look(GREEN, "D"),
    Look(PURPLE, "^"),
    Look(BROWN, "P"),
    Look(GREY, "X"),
    Look(INK, "v"),
)

NAMES = {
    "budget": "fixed budget",
    "confidence": "paragraph confidence",
    "learned": "learned exit",
    "full": "full thinking",
    "no_think": "no thinking",
    "oracle": "oracle (needs the answer)",
}
"""Names of the methods in words."""


def look(name: str, place: int) -> Look:
    """The look of a series: its own where it is a known method, else one by its place in the figure."""
    return LOOKS.get(name, _OTHERS[place % len(_OTHERS)])


def words(name: str) -> str:
    """A method or series in words."""
    return NAMES.get(name, name.replace("_", " "))

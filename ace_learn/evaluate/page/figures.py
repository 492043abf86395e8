"""The figures of report pages, as SVG text in which the page's own style rules colours and fonts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy import ndarray

from ace_learn.evaluate.page.reliability import Reliability
from ace_learn.evaluate.page.svg import drawing, to_svg
from ace_learn.evaluate.page.text import clean
from ace_learn.evaluate.style import BLUE, GREY, INK, MUTED, RED, look, words

_DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
_LEGEND_ROW = 17
_LABEL_WIDTH = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A curve.

    Attributes:
        name: method or series; a known method has its own colour and marker.
        x: places, in any order.
        y: values.
    """

    name: str
    x: Float[ndarray, " g"]
    y: Float[ndarray, " g"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point with an interval; a point and a line of the same name share their colour.

    Attributes:
        name: method or series.
        x: place.
        y: value.
        low: lower end of the interval of `y`; nan: none.
        high: upper end; nan: none.
    """

    name: str
    x: float
    y: float
    low: float = math.nan
    high: float = math.nan


def pareto_svg(
    curves: Sequence[Line],
    points: Sequence[Point],
    *,
    x_label: str = "mean output tokens per problem",
    y_label: str = "accuracy, %",
    y_scale: float = 100.0,
) -> str:
    """Accuracy over cost: curves along thresholds, and a point with whiskers per method.

    Args:
        curves: lines, in natural units.
        points: points, in natural units.
        x_label: label of the cost axis.
        y_label: label of the other axis.
        y_scale: factor from natural units to those of `y_label`.
    """
    names = list(dict.fromkeys([*(point.name for point in points), *(curve.name for curve in curves)]))
    rows = math.ceil(len(names) / 2)
    with drawing(270 + _LEGEND_ROW * rows) as (figure, (axes,)):
        for curve in curves:
            order = np.argsort(curve.x, kind="stable")
            colour = look(curve.name, names.index(curve.name)).colour.light
            axes.plot(curve.x[order], y_scale * curve.y[order], color=colour, alpha=0.7, linewidth=1.6)
        for point in points:
            style = look(point.name, names.index(point.name))
            whiskers = [[y_scale * _gap(point.y, point.low)], [y_scale * _gap(point.high, point.y)]]
            axes.errorbar(
                point.x,
                y_scale * point.y,
                yerr=whiskers,
                color=style.colour.light,
                marker=style.marker,
                markersize=_size(style.marker),
                capsize=3,
                linestyle="none",
                zorder=3,
            )
        axes.set_xlabel(clean(x_label))
        axes.set_ylabel(clean(y_label))
        pointed = {point.name for point in points}
        _legend(figure, [_handle(name, place, marked=name in pointed) for place, name in enumerate(names)])
        return to_svg(figure)


def reliability_svg(
    result: Reliability, *, x_label: str = "predicted probability", y_label: str = "observed share"
) -> str:
    """Observed share over predicted probability, with the count of each bin below.

    Args:
        result: from `reliability`; its `caption` goes with the figure.
        x_label: label of the prediction.
        y_label: label of the observation.
    """
    with drawing(360, ratios=(4, 1)) as (figure, (above, below)):
        above.plot([0, 1], [0, 1], color=MUTED.light, linestyle="--", linewidth=1.2)
        above.errorbar(
            result.predicted,
            result.observed,
            yerr=[np.maximum(result.observed - result.low, 0), np.maximum(result.high - result.observed, 0)],
            color=BLUE.light,
            marker="o",
            markersize=6,
            capsize=3,
            linewidth=1.6,
        )
        above.set(xlim=(-0.02, 1.02), ylim=(-0.04, 1.04), ylabel=clean(y_label))
        width = 1 / result.bins
        places = np.minimum(np.floor(result.predicted * result.bins), result.bins - 1) * width
        below.bar(places, result.counts, width=0.9 * width, align="edge", color=GREY.light)
        below.set_xlabel(clean(x_label))
        below.set_ylabel("count")
        below.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        return to_svg(figure)


def training_curves_svg(
    losses: Mapping[str, Sequence[float]],
    *,
    weights: Mapping[str, Sequence[float]] | None = None,
    kept: int | None = None,
    y_label: str = "loss",
) -> str:
    """Losses after each epoch, and below them, where given, the tasks' weights.

    Args:
        losses: one series per task or split, a value per epoch; nan where there is none.
        weights: loss weights per task.
        kept: the epoch whose weights were kept, counted from 0.
        y_label: label of the losses.
    """
    names = list(dict.fromkeys([*losses, *(weights or {})]))
    rows = math.ceil((len(names) + (kept is not None)) / 2)
    height = 250 + _LEGEND_ROW * rows
    with drawing(height + (120 if weights else 0), ratios=(2, 1) if weights else (1,)) as (figure, panels):
        for axes, series, label in zip(panels, (losses, weights or {}), (y_label, "weight"), strict=False):
            _series(axes, series, names, y_label=label, kept=kept)
        panels[-1].set_xlabel("epoch")
        handles = [_series_handle(name, place) for place, name in enumerate(names)]
        if kept is not None:
            label = f"weights kept: epoch {kept + 1}"
            handles.append(Line2D([], [], color=MUTED.light, linewidth=1, label=label))
        _legend(figure, handles)
        return to_svg(figure)


def bars_svg(
    labels: Sequence[str],
    values: Sequence[float],
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    *,
    x_label: str = "",
    form: str = ".3f",
    reference: float | None = None,
    reference_label: str = "",
    highlight: Sequence[str] = (),
) -> str:
    """Horizontal bars from zero, each with its label and figures above it, so that long labels fit a phone.

    Args:
        labels: what each bar is.
        values: their lengths; nan: no bar, and the figure reads n/a.
        low: lower ends of the intervals; nan: none.
        high: upper ends.
        x_label: what the bars measure.
        form: format of the figures.
        reference: where to draw a mark across each bar.
        reference_label: what the mark is.
        highlight: labels of the bars that stand out; all do where none is named.

    Raises:
        ValueError: the sequences differ in length, or there are none.
    """
    count = len(labels)
    lows, highs = (list(ends) if ends is not None else [math.nan] * count for ends in (low, high))
    if not count or not len(values) == len(lows) == len(highs) == count:
        raise ValueError(
            f"bars need as many labels as values and ends, and at least one, not {count}, {len(values)}, "
            f"{len(lows)} and {len(highs)}"
        )
    texts = [textwrap.fill(clean(label), _LABEL_WIDTH) or " " for label in labels]
    heights = [30 + 14 * text.count("\n") for text in texts]
    legend = _LEGEND_ROW if reference is not None and reference_label else 0
    with drawing(sum(heights) + 55 + legend) as (figure, (axes,)):
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        places = np.cumsum(heights) - 8.0
        shown = [label in highlight or not highlight for label in labels]
        for row in range(count):
            colour = BLUE.light if shown[row] else GREY.light
            _bar(axes, places[row], values[row], lows[row], highs[row], colour)
            _bar_text(axes, places[row] - 7, texts[row], _figures(values[row], lows[row], highs[row], form))
        axes.axvline(0, color=MUTED.light, linewidth=1)
        if reference is not None:
            marked = places[np.isfinite(values)]
            axes.vlines([reference] * len(marked), marked - 7, marked + 7, color=RED.light, linewidth=2, zorder=3)
            if reference_label:
                _legend(figure, [Line2D([], [], color=RED.light, linewidth=2, label=clean(reference_label))])
        axes.set_ylim(float(sum(heights)), 0)
        axes.set_yticks([])
        axes.set_xlabel(clean(x_label))
        return to_svg(figure)


def _bar(axes: Axes, place: float, value: float, low: float, high: float, colour: str) -> None:
    if not math.isfinite(value):
        return
    axes.barh(place, value, height=9, color=colour)
    whiskers = [[_gap(value, low)], [_gap(high, value)]]
    if whiskers != [[0.0], [0.0]]:
        axes.errorbar(value, place, xerr=whiskers, color=INK.light, capsize=3, linewidth=1.3, linestyle="none")


def _bar_text(axes: Axes, place: float, label: str, figures: str) -> None:
    across = axes.get_yaxis_transform()
    axes.text(0.0, place, label, transform=across, va="bottom", ha="left", fontsize=11)
    axes.text(1.0, place, figures, transform=across, va="bottom", ha="right", fontsize=11, color=MUTED.light)


def _figures(value: float, low: float, high: float, form: str) -> str:
    if not math.isfinite(value):
        return "n/a"
    ends = f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:{form}}{ends}"


def _gap(upper: float, lower: float) -> float:
    """Length of a whisker, 0 where an end is unknown."""
    return max(0.0, upper - lower) if math.isfinite(upper - lower) else 0.0


def _size(marker: str) -> float:
    return 12 if marker == "*" else 7


def _series(
    axes: Axes, series: Mapping[str, Sequence[float]], names: Sequence[str], *, y_label: str, kept: int | None
) -> None:
    for name, values in series.items():
        place = names.index(name)
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=look("", place).colour.light,
            linestyle=_DASHES[place % len(_DASHES)],
            marker="." if len(values) <= 40 else "",
            linewidth=1.6,
        )
    if kept is not None:
        axes.axvline(kept + 1, color=MUTED.light, linewidth=1, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(clean(y_label))


def _handle(name: str, place: int, *, marked: bool) -> Line2D:
    style = look(name, place)
    return Line2D(
        [],
        [],
        color=style.colour.light,
        marker=style.marker if marked else "",
        markersize=_size(style.marker),
        linewidth=1.6,
        label=_short(words(name)),
    )


def _series_handle(name: str, place: int) -> Line2D:
    colour = look("", place).colour.light
    return Line2D([], [], color=colour, linestyle=_DASHES[place % len(_DASHES)], linewidth=1.6, label=_short(name))


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    figure.legend(handles=list(handles), loc="outside lower left", ncols=1 if len(handles) == 1 else 2)


def _short(label: str) -> str:
    """A label for a legend of two columns. matplotlib hides labels that begin with an underscore."""
    return textwrap.shorten(clean(label).lstrip("_"), 27, placeholder="...") or "..."

"""Plots of calibration and results, drawn without a display. Import this module only where one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ace_learn.evaluate.bootstrap import Interval
from ace_learn.evaluate.calibration import upper_bound
from ace_learn.evaluate.compare import Curve, Evaluation
from ace_learn.evaluate.learned import CalibratedPolicy, Risk
from ace_learn.evaluate.style import BLUE, GREEN, RED, look, words


class Dot(NamedTuple):
    """A method in the plot of accuracy over tokens.

    Attributes:
        name: name of the method.
        tokens_mean: mean output tokens.
        accuracy: share of right answers.
        interval: its 95% interval.
    """

    name: str
    tokens_mean: float
    accuracy: float
    interval: Interval


def plot_calibration(path: Path, calibrated: CalibratedPolicy, risk: Risk) -> None:
    """Draw risk over savings along the test sequence, with the certified candidates and the chosen one.

    Args:
        path: PNG to write.
        calibrated: outcome of the calibration.
        risk: what was certified.
    """
    figure, axes = _figure()
    result = calibrated.result
    name = risk.loss.replace("_", "-")
    order = np.argsort(calibrated.savings, kind="stable")
    savings, losses = calibrated.savings[order], result.losses[order]
    bounds = np.array([upper_bound(int(count), result.n, 1 - risk.delta) for count in losses])
    axes.plot(savings, losses / result.n, color=BLUE.light, marker=".", label="measured on calibration")
    axes.fill_between(savings, losses / result.n, bounds, color=BLUE.light, alpha=0.15, label="up to its upper bound")
    axes.axhline(risk.alpha, color=RED.light, linestyle="--", label=f"alpha = {risk.alpha:.1%}")
    sure = result.certified
    axes.plot(
        calibrated.savings[sure],
        result.losses[sure] / result.n,
        color=GREEN.light,
        marker="o",
        linestyle="none",
        label=f"certified ({len(sure)} of {len(losses)})",
    )
    if result.chosen is not None:
        axes.plot(
            calibrated.savings[result.chosen],
            result.losses[result.chosen] / result.n,
            color=RED.light,
            marker="*",
            markersize=14,
            linestyle="none",
            label="chosen",
        )
    axes.set_xlabel("captured savings (share of what the oracle saves)")
    axes.set_ylabel(f"{name} rate, {result.n} problems")
    axes.set_title(f"Calibration: {name} <= {risk.alpha:.1%}, {risk.method.replace('_', ' ')}")
    top = 1.5 * max(2 * risk.alpha, float(bounds.min(initial=1.0)))
    axes.set_ylim(-0.02 * top, top)
    shown = savings[losses / result.n <= top]
    if shown.max(initial=0.0) > 0:  # on a calibration split without savings there is no width to show
        axes.set_xlim(0, 1.05 * float(shown.max()))
    axes.legend(loc="upper left", frameon=False)
    _save(figure, path)


def plot_pareto(path: Path, evaluation: Evaluation) -> None:
    """Draw accuracy over mean output tokens: curves along the thresholds, and a point per method.

    Args:
        path: PNG to write.
        evaluation: results on the test split.
    """
    points = [
        Dot(row.method, row.tokens_mean, row.accuracy, evaluation.intervals[row.method].accuracy)
        for row in evaluation.rows
    ]
    plot_dots(
        path,
        evaluation.curves,
        points,
        title=f"Accuracy over tokens, {evaluation.rows[0].n} held-out problems, 95% intervals",
    )


def plot_dots(path: Path, curves: Mapping[str, Curve], dots: Sequence[Dot], *, title: str) -> None:
    """Draw accuracy over mean output tokens.

    Args:
        path: PNG to write.
        curves: along the thresholds of some of the methods.
        dots: the methods.
        title: of the figure.
    """
    figure, axes = _figure()
    places = {dot.name: place for place, dot in enumerate(dots)}
    for name, curve in curves.items():
        order = np.argsort(curve.tokens_mean, kind="stable")
        colour = look(name, places[name]).colour.light
        axes.plot(curve.tokens_mean[order], 100 * curve.accuracy[order], color=colour, alpha=0.6, linewidth=1.6)
    for dot in dots:
        style = look(dot.name, places[dot.name])
        axes.errorbar(
            dot.tokens_mean,
            100 * dot.accuracy,
            yerr=_whiskers(dot.accuracy, dot.interval),
            color=style.colour.light,
            marker=style.marker,
            markersize=13 if dot.name == "learned" else 7,
            capsize=3,
            linestyle="none",
            zorder=4 if dot.name == "learned" else 3,
            label=f"{words(dot.name)}: {dot.accuracy:.1%} at {dot.tokens_mean:.0f}",
        )
    axes.set_xlabel("mean output tokens per problem (think and answer)")
    axes.set_ylabel("accuracy, %")
    axes.set_title(title)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    _save(figure, path)


def _whiskers(value: float, interval: Interval) -> list[list[float]]:
    return [[100 * max(0.0, value - interval.low)], [100 * max(0.0, interval.high - value)]]


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)

"""The plot of the verification sweep, drawn without a display. Import this module only where it is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ace_learn.artifacts import write_bytes
from ace_learn.evaluate.speculation.verification import Throughput, series_of
from ace_learn.evaluate.style import BLUE, BROWN, GREEN, INK, ORANGE, PURPLE, RED

_COLOURS = (INK, BROWN, GREEN, ORANGE, PURPLE, RED)
_MARKERS = "so^vDP"


def plot_throughput(path: Path, panels: Mapping[str, Throughput]) -> None:
    """Draws throughput over concurrency, one panel for each set of figures.

    Args:
        path: PNG to write.
        panels: Tokens per second, by title.
    """
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for index, name in enumerate(next(iter(found.values()))):
            adaptive = name.startswith("adaptive")
            axes.plot(
                list(found),
                series_of(found, name),
                label=name,
                color=BLUE.light if adaptive else _COLOURS[index % len(_COLOURS)].light,
                marker="*" if adaptive else _MARKERS[index % len(_MARKERS)],
                linewidth=2.5 if adaptive else 1.0,
            )
        axes.set(
            title=title, xscale="log", xlabel="running requests", ylabel="tokens per second, relative to the first"
        )
        axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())

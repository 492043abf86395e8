"""A made-up page with one section of every kind, and with text that attacks."""

from __future__ import annotations

import numpy as np

from ace_learn.evaluate.page import (
    Cell,
    Collapsible,
    Fact,
    Facts,
    Figure,
    Line,
    Page,
    Point,
    Prose,
    Table,
    TraceParagraph,
    TraceView,
    bars_svg,
    pareto_svg,
    reliability,
    reliability_svg,
    training_curves_svg,
)

HOSTILE = "<script>document.title='owned'</script></style><img src=x onerror=alert(1)> & \"quotes\" {{ 7 * 7 }} "
LONG = "x" * 900
CONTROLS = "bell\x07 escape\x1b[31m reversed \u202egnp.exe\u202c \x00 lone \ud800 $x^2$ \u6f22"


def figures() -> dict[str, str]:
    x = np.linspace(30, 200, 20)
    curves = [Line(name=name, x=x, y=1 - np.exp(-x / scale)) for name, scale in (("budget", 60), ("learned", 25))]
    points = [
        Point(name="full", x=190.0, y=0.94, low=0.92, high=0.96),
        Point(name="learned", x=85.0, y=0.93, low=0.91, high=0.95),
        Point(name=HOSTILE, x=50.0, y=0.5),
    ]
    rng = np.random.default_rng(0)
    predicted = rng.beta(2, 1, 500)
    epochs = np.exp(-np.arange(12) / 5)
    losses = {"confidence": epochs.tolist(), "progress": (0.5 * epochs).tolist()}
    return {
        "pareto": pareto_svg(curves, points),
        "reliability": reliability_svg(reliability(predicted, rng.random(500) < predicted)),
        "training": training_curves_svg(losses, weights=losses, kept=7),
        "bars": bars_svg(
            ["all signals", f"without {HOSTILE}", CONTROLS],
            [0.9, 0.4, float("nan")],
            [0.8, 0.3, float("nan")],
            [0.95, 0.5, float("nan")],
            reference=0.7,
            reference_label="default",
            highlight=["all signals"],
        ),
    }


def trace(exit_index: int = 1, **changes: object) -> TraceView:
    texts = ("Let a = 3.", f"So b = 7.\n{HOSTILE}", LONG, CONTROLS)
    paragraphs = [
        TraceParagraph(
            text=text,
            signals={"score": 0.2 + 0.25 * place, "remaining": 90.0 - 30 * place},
            matches=place >= 1,
            answer=HOSTILE if place else None,
        )
        for place, text in enumerate(texts)
    ]
    paragraphs.append(TraceParagraph(text="Done.", matches=True, answer="7", closed=False))
    fields: dict[str, object] = {
        "heading": f"Example {exit_index}",
        "prompt": HOSTILE + LONG,
        "paragraphs": tuple(paragraphs),
        "exit_index": exit_index,
        "full_answer": "7",
        "early_answer": HOSTILE,
        "note": "The first one.",
        "bounds": {"score": 0.4},
        "gold": "7",
    }
    return TraceView(**{**fields, **changes})


def page() -> Page:
    columns = ("method", "accuracy", "tokens", "what it is", *(f"column {i}" for i in range(8)))
    rows = tuple(
        (name, Cell(text="93.1%", detail="[92.0%, 94.0%]"), "81.5", HOSTILE, *["0.123"] * 8)
        for name in ("full thinking", "learned exit", LONG)
    )
    drawn = figures()
    return Page(
        title=f"Report {HOSTILE}",
        intro=("A made-up page.", HOSTILE),
        sections=(
            Facts(heading="In short", items=(Fact(label="accuracy", value="93.1%", detail="full 94%"),)),
            Table(heading="Results", columns=columns, rows=rows, note=HOSTILE, highlight=("learned exit",)),
            *(Figure(heading=name, svg=svg, caption=HOSTILE, alt=f"{name} {HOSTILE}") for name, svg in drawn.items()),
            trace(1),
            trace(4),
            Collapsible(heading="More", sections=(Prose(heading=HOSTILE, paragraphs=(HOSTILE, LONG)),)),
        ),
    )

"""`report.html` of an ablation, and the points of its Pareto plot. Import this module only where a page is drawn."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from ace_learn.evaluate.ablation.report import Ablation, ReferenceData, difference, family_row, label, stars
from ace_learn.evaluate.ablation.table import Figures
from ace_learn.evaluate.ablation.variants import REFERENCE
from ace_learn.evaluate.bootstrap import Interval
from ace_learn.evaluate.compare import Curve
from ace_learn.evaluate.examples import RULE, trace_view
from ace_learn.evaluate.page import (
    Cell,
    Collapsible,
    Figure,
    Line,
    Page,
    Point,
    Prose,
    Section,
    Table,
    TraceView,
    bars_svg,
    pareto_svg,
    reliability,
    reliability_svg,
    training_curves_svg,
)
from ace_learn.evaluate.plots import Dot
from ace_learn.evaluate.style import LOOKS
from ace_learn.heads.report import TrainReport
from ace_learn.signals import SIGNALS

_OWN_LOOKS = 4

_BEST = 3
"""So many variants stand beside the methods in the Pareto plot."""


def ablation_page(ablation: Ablation, data: ReferenceData) -> Page:
    """The report as a page.

    Args:
        ablation: everything that was measured.
        data: the reference's signals and texts.
    """
    examples = example_views(ablation, data)
    sections: list[Section] = [pareto_figure(ablation), method_table(ablation, "Methods", ablation.methods)]
    sections += [group_section(ablation, key) for key in ablation.config.groups]
    sections += [
        Collapsible(heading="Captured savings by family", sections=(family_table(ablation),)),
        *reliability_figures(ablation, data.signals),
        *training_sections(ablation.training),
    ]
    if examples:
        rule = Prose(heading="How they were chosen", paragraphs=(RULE.replace("learned exit", "reference"),))
        sections.append(Collapsible(heading="Examples", sections=(rule, *examples), opened=True))
    return Page(title="Ablation of learned exits", intro=ablation.held_fixed, sections=tuple(sections))


def pareto(ablation: Ablation) -> tuple[dict[str, Curve], list[Dot]]:
    """Curves and points of accuracy over tokens: all methods, and the variants that capture most.

    The reference goes by the name `learned`, under which figures know it.
    """
    overall = ablation.measured.overall
    learned = [name for name in ablation.outcomes if name not in ablation.methods]
    best = sorted(learned, key=lambda name: -np.nan_to_num(overall[name].captured_savings))[:_BEST]
    known = [name for name in ablation.methods if _styled(name) in LOOKS]
    others = [name for name in (*ablation.methods, *best) if name not in known]
    # Others get their look by their place, and the looks of the first places are too like those of known methods.
    names = [*known[:_OWN_LOOKS], *others, *known[_OWN_LOOKS:]]
    rows = [(_styled(name), overall[name]) for name in names]
    dots = [Dot(name, row.tokens_mean, row.accuracy, row.accuracy_interval) for name, row in rows]
    curves = dict(ablation.curves)
    if ablation.outcomes[REFERENCE].curve.tokens_mean.size:
        curves["learned"] = ablation.outcomes[REFERENCE].curve
    return curves, dots


def pareto_figure(ablation: Ablation) -> Figure:
    """Accuracy over tokens."""
    curves, dots = pareto(ablation)
    lines = [Line(name=name, x=curve.tokens_mean, y=curve.accuracy) for name, curve in curves.items()]
    points = [
        Point(name=dot.name, x=dot.tokens_mean, y=dot.accuracy, low=dot.interval.low, high=dot.interval.high)
        for dot in dots
    ]
    told = "; ".join(f"{dot.name} {dot.accuracy:.1%} at {dot.tokens_mean:.0f} tokens" for dot in dots)
    return Figure(
        heading="Accuracy over tokens",
        svg=pareto_svg(lines, points),
        caption=(
            "Up and to the left is better. The learned exit is the reference. Points: methods as tuned on other "
            f"splits, and the {_BEST} variants that capture most on this one, with 95% intervals. Curves: what other "
            "thresholds of the same methods would have given on these problems."
        ),
        alt=f"Accuracy over mean output tokens: {told}.",
    )


def method_table(ablation: Ablation, heading: str, names: Sequence[str]) -> Table:
    """Figures of some methods, with their differences from the reference."""
    overall = ablation.measured.overall
    return Table(
        heading=heading,
        columns=("variant", "captured savings", "against the reference", "tokens", "accuracy", "lost-correct"),
        rows=tuple(_row(label(ablation, name), name, overall[name]) for name in names),
        note=(
            "Captured savings: share of the tokens that an oracle saves, which exits where the answer first stands. "
            "Differences are in points; * and ** as above. Bound: one-sided exact 95% bound."
        ),
        highlight=(REFERENCE,),
    )


def group_section(ablation: Ablation, key: str) -> Collapsible:
    """Bars with intervals and the table of a group."""
    names, overall = ablation.group(key), ablation.measured.overall
    values = [overall[name].captured_savings for name in names]
    ends = [overall[name].captured_savings_interval for name in names]
    told = "; ".join(f"{name} {value:.1%}" for name, value in zip(names, values, strict=True))
    figure = Figure(
        heading="Captured savings",
        svg=bars_svg(
            [label(ablation, name) + stars(overall[name]) for name in names],
            [100 * value for value in values],
            [100 * end.low for end in ends],
            [100 * end.high for end in ends],
            x_label="captured savings, %",
            form=".1f",
            reference=100 * values[0],
            reference_label="the reference",
        ),
        caption="Captured savings at the same certified risk, with 95% intervals. * and ** mark differences as above.",
        alt=f"Captured savings: {told}.",
    )
    sections: list[Section] = [
        figure,
        Collapsible(heading="In numbers", sections=(method_table(ablation, "Figures", names),)),
    ]
    heads = list(dict.fromkeys(ablation.plan.variants[name].head for name in names))
    if len(heads) > 1:
        training = {head: ablation.training[head] for head in heads}
        sections.append(Collapsible(heading="Training of these heads", sections=(validation_figure(training),)))
    return Collapsible(heading=ablation.config.groups[key].title, sections=tuple(sections), opened=True)


def family_table(ablation: Ablation) -> Table:
    """Captured savings of every method by family."""
    families = list(ablation.measured.families)
    return Table(
        heading="By family",
        columns=("variant", "all", *families),
        rows=tuple(family_row(ablation, name) for name in ablation.results),
        note="Each family has its own intervals; * marks a difference from the reference whose interval excludes 0.",
        highlight=(REFERENCE,),
    )


def reliability_figures(ablation: Ablation, signals: Float32[ndarray, "n P S"]) -> tuple[Figure, ...]:
    """Whether the reference head's consistency and confidence come true; no figure where there is no boundary."""
    test = ablation.splits.test
    real = test.is_boundary
    if not real.any():
        return ()
    kept = test.matches_at[:, :-1][real]
    notes = {
        "consistency": "It is trained to be this probability.",
        "confidence": "It is trained to be the probability of the paragraph's tokens, not to lie on the diagonal.",
    }
    figures = []
    for name, note in notes.items():
        result = reliability(signals[..., SIGNALS.index(name)][real].astype(np.float64), kept)
        told = ", ".join(f"{p:.2f} came true {o:.2f}" for p, o in zip(result.predicted, result.observed, strict=True))
        figures.append(
            Figure(
                heading=f"Reliability of the {name} signal",
                svg=reliability_svg(result, x_label=f"predicted {name}", y_label="share that kept the full answer"),
                caption=f"The reference head at all paragraph ends of the test split. {note} {result.caption}",
                alt=f"Reliability diagram; predictions of {told}.",
            )
        )
    return tuple(figures)


def validation_figure(training: Mapping[str, TrainReport]) -> Figure:
    """Validation loss of several heads."""
    curves = {name: [epoch["validation"] for epoch in report.history] for name, report in training.items()}
    return Figure(
        heading="Validation loss",
        svg=training_curves_svg(curves, y_label="validation loss"),
        caption=(
            "The validation objective after each epoch, with the fixed weights whatever weights a head was trained "
            "with. Heads with other rows or other targets have other validation rows or targets: compare only like "
            "with like."
        ),
        alt=f"Validation loss over the epochs of the heads {', '.join(training)}.",
    )


def training_sections(training: Mapping[str, TrainReport]) -> tuple[Section, Section]:
    """Metrics of all heads, and the course of each."""
    single = tuple(_course(name, report) for name, report in training.items())
    return _metrics_table(training), Collapsible(heading="Each head's training", sections=single)


def _course(name: str, report: TrainReport) -> Figure:
    """Losses of one head, and its weights where they moved."""
    history = report.history
    losses = {"train": [epoch["train"] for epoch in history], "validation": [epoch["validation"] for epoch in history]}
    losses |= {f"{s} (validation)": [epoch["validation_losses"][s] for epoch in history]
               for s in history[0]["validation_losses"]}  # fmt: skip
    moved = any(epoch["gradient_norms"] for epoch in history)
    weights = {s: [epoch["weights"][s] for epoch in history] for s in history[0]["weights"]} if moved else None
    return Figure(
        heading=name,
        svg=training_curves_svg(losses, weights=weights, kept=report.best_epoch, y_label="loss"),
        caption=f"{report.rows[0]:,} training rows, {report.rows[1]:,} validation rows."
        + (" Below: the weights, which follow the gradients." if moved else ""),
        alt=f"Losses of the head {name} over {len(history)} epochs.",
    )


def _metrics_table(training: Mapping[str, TrainReport]) -> Table:
    rows = []
    for name, report in training.items():
        head, linear = report.head, report.baseline
        rows.append(
            (
                name,
                _figure(head.consistency.auc),
                _figure(linear.consistency.auc),
                _figure(head.consistency.ece),
                _figure(head.progress.r2),
                _figure(head.remaining_log.r2),
                _figure(head.confidence.r2),
                f"{report.best_epoch + 1}/{len(report.history)}",
            )
        )
    return Table(
        heading="Heads on the validation split",
        columns=("head", "consistency AUC", "linear model's", "consistency ECE", "progress R2", "log remaining R2",
                 "confidence R2", "best epoch"),
        rows=tuple(rows),
        note="The linear model is scikit-learn's on the same features.",
    )  # fmt: skip


def example_views(ablation: Ablation, data: ReferenceData) -> tuple[TraceView, ...]:
    """The chosen examples; none where the texts are not known."""
    texts, outcome = data.texts, ablation.outcomes[REFERENCE]
    if texts is None:
        return ()
    return tuple(
        trace_view(
            example,
            texts.records[example.place],
            data.smoothed[example.place],
            policy=outcome.policy,
            exit_index=int(outcome.exit_index[example.place]),
            decode=texts.decode,
        )
        for example in ablation.examples
    )


def _row(name: str, method: str, figures: Figures) -> tuple[str | Cell, ...]:
    text, _, detail = difference(method, figures).partition(" [")
    ends, _, mark = detail.partition("]")
    return (
        name,
        Cell(text=_percent(figures.captured_savings), detail=_brackets(figures.captured_savings_interval)),
        Cell(text=text + mark, detail=f"[{ends}]" if ends else ""),
        f"{figures.tokens_mean:.1f}",
        Cell(text=_percent(figures.accuracy), detail=_brackets(figures.accuracy_interval)),
        Cell(text=f"{figures.lost_correct:.2%}", detail=f"bound {figures.lost_correct_ucb95:.2%}"),
    )


def _styled(name: str) -> str:
    return "learned" if name == REFERENCE else name


def _percent(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.1%}"


def _brackets(interval: Interval) -> str:
    return f"[{_percent(interval.low)}, {_percent(interval.high)}]"


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"

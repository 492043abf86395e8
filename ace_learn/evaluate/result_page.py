"""The result report as a page: what `report.md` says, with figures and examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from ace_learn.artifacts import JSON, JsonFields, read_fields
from ace_learn.evaluate.bootstrap import Interval
from ace_learn.evaluate.calibration import Certificate, upper_bound
from ace_learn.evaluate.compare import Evaluation
from ace_learn.evaluate.examples import RULE, choose, trace_view
from ace_learn.evaluate.live import load_records
from ace_learn.evaluate.loading import open_head
from ace_learn.evaluate.metrics import LatencyModel, MethodRow, RowIntervals
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
    Section,
    Table,
    TraceView,
    pareto_svg,
    reliability,
    reliability_svg,
    training_curves_svg,
)
from ace_learn.evaluate.report import findings
from ace_learn.evaluate.signals import boundary_signals, smoothed_signals
from ace_learn.evaluate.style import words
from ace_learn.evaluate.traces import Traces, load_traces
from ace_learn.heads.report import TrainReport
from ace_learn.labels.records import TraceRecord
from ace_learn.signals import SIGNALS


@dataclass(frozen=True, kw_only=True, eq=False)
class PageData:
    """What the page shows beside the evaluation.

    Attributes:
        traces: the test traces.
        records: the same traces as stored, in the same order, with their text.
        signals: unsmoothed signals at their boundaries, nan on padding.
        smoothed: the signals as the exit rule saw them.
        training: how the head was trained.
    """

    traces: Traces
    records: tuple[TraceRecord, ...]
    signals: Float32[ndarray, "n P S"]
    smoothed: Float32[ndarray, "n P S"]
    training: TrainReport


def load_page_data(dataset: Path, trained: Path, calibrated: Path, evaluation: Evaluation) -> PageData:
    """Read what the page shows from the folders of the stages.

    Args:
        dataset: folder written by `build`.
        trained: folder written by `train`.
        calibrated: folder written by `calibrate`.
        evaluation: the evaluation of the policy in it.

    Raises:
        ValueError: as `open_head`, or a folder is incomplete.
    """
    reader, policy, traces = open_head(dataset, calibrated).reader, evaluation.policy, load_traces(dataset, "test")
    return PageData(
        traces=traces,
        records=tuple(sorted(load_records(dataset, "test"), key=lambda record: record.problem)),
        signals=boundary_signals(reader, traces),
        smoothed=smoothed_signals(reader, traces, ewma=policy.ewma, smooth_over=policy.smooth_over),
        training=TrainReport.from_json(read_fields(trained / "metrics.json")),
    )


def result_page(
    evaluation: Evaluation,
    data: PageData,
    *,
    live: Mapping[str, JSON],
    stages: Mapping[str, JSON],
    latency: LatencyModel,
    decode: Callable[[Sequence[int]], str],
) -> Page:
    """The report as a page.

    Args:
        evaluation: results on the test split.
        data: traces, signals and training.
        live: figures of the live run.
        stages: what made the report: hash and seconds of each stage.
        latency: the measured latency model behind the two time columns.
        decode: from token ids to text.
    """
    examples = example_views(evaluation, data, decode)
    found = [(text.replace("`", "'"), caution) for text, caution in findings(evaluation)]
    return Page(
        title="Learned early exit: report",
        intro=(
            f"{evaluation.rows[0].n} held-out problems. A learned exit ends the model's thinking where it has become "
            "redundant; the page shows what that saves and what it costs.",
            *(text for text, caution in found if caution),
        ),
        sections=(
            summary(evaluation),
            result_table(evaluation, latency),
            pareto_figure(evaluation),
            Prose(heading="Comparisons", paragraphs=tuple(text for text, _ in found)),
            certificate_section(evaluation),
            *reliability_figure(data),
            training_figure(data.training),
            Collapsible(
                heading="Examples",
                intro=(RULE if examples else "On no test problem does the exit save tokens.",),
                sections=examples,
                opened=True,
            ),
            Collapsible(heading="How this was made", sections=(stage_table(stages), live_table(live))),
        ),
    )


def summary(evaluation: Evaluation) -> Facts:
    """The figures of the learned policy that matter most."""
    rows = {row.method: row for row in evaluation.rows}
    full, learned = rows["full"], rows["learned"]
    intervals = evaluation.intervals["learned"]
    return Facts(
        heading="In short",
        items=(
            Fact(label="accuracy", value=_percent(learned.accuracy), detail=f"full thinking {_percent(full.accuracy)}"),
            Fact(
                label="output tokens per problem",
                value=f"{learned.tokens_mean:.0f}",
                detail=f"full thinking {full.tokens_mean:.0f}",
            ),
            Fact(
                label="captured savings",
                value=_percent(learned.captured_savings),
                detail=f"of the oracle's {_brackets(intervals.captured_savings)}",
            ),
            Fact(
                label="lost answers",
                value=_percent(learned.lost_correct, 2),
                detail=f"95% bound {_percent(learned.lost_correct_ucb95, 2)}",
            ),
        ),
    )


def result_table(evaluation: Evaluation, latency: LatencyModel) -> Table:
    """All methods with their intervals."""
    return Table(
        heading="Results",
        columns=(
            "method", "accuracy", "think tokens", "tokens", "captured savings", "lost-correct", "time to valid answer",
            "valid answers/s",
        ),
        rows=tuple(_result_row(row, evaluation.intervals[row.method]) for row in evaluation.rows),
        note=(
            "Brackets: paired bootstrap 95% intervals; bound: one-sided exact 95% bound. Tokens are means per problem, "
            "think and answer. Captured savings: share of the tokens that an oracle saves, which exits where the "
            "answer first stands. Both time columns are modelled from two measured constants, not timed per request: "
            f"{latency.prefill_s:.4f} s + {latency.per_token_s:.5f} s per output token up to the commit."
        ),
        highlight=(words("learned"),),
    )  # fmt: skip


def pareto_figure(evaluation: Evaluation) -> Figure:
    """Accuracy over tokens."""
    curves = [Line(name=name, x=curve.tokens_mean, y=curve.accuracy) for name, curve in evaluation.curves.items()]
    points = [
        Point(
            name=row.method,
            x=row.tokens_mean,
            y=row.accuracy,
            low=evaluation.intervals[row.method].accuracy.low,
            high=evaluation.intervals[row.method].accuracy.high,
        )
        for row in evaluation.rows
    ]
    told = "; ".join(f"{words(p.name)} {_percent(p.y)} at {p.x:.0f} tokens" for p in points)
    return Figure(
        heading="Accuracy over tokens",
        svg=pareto_svg(curves, points),
        caption=(
            "Up and to the left is better. Points: the methods as tuned on other splits, with 95% intervals. Curves: "
            "what other thresholds of the same methods would have given on these problems."
        ),
        alt=f"Accuracy over mean output tokens: {told}.",
    )


def certificate_section(evaluation: Evaluation) -> Section:
    """What was certified about the learned policy, or why it never exits."""
    stored = evaluation.policy.certificate
    if stored is None:
        text = "Nothing was certified. The learned policy is 'never': it lets every trace think to its natural end."
        if evaluation.policy.predicate != "never":
            text = "The policy carries no certificate: nothing was proved about the answers that it may cost."
        return Prose(heading="Certificate", paragraphs=(text,))
    certificate = Certificate.from_json(stored)
    bound = upper_bound(certificate.losses, certificate.n, 1 - certificate.delta)
    rows = (
        ("risk", certificate.loss.replace("_", "-")),
        ("level", f"alpha = {certificate.alpha:.2%}, delta = {certificate.delta:.2%}"),
        ("guarantee", certificate.guarantee),
        ("calibration problems", f"{certificate.n:,}"),
        ("losses among them", f"{certificate.losses} (upper bound of the risk {bound:.2%})"),
        ("p-value", f"{certificate.p_value:.3g}"),
        ("method", certificate.method.replace("_", " ")),
        ("candidates tried", f"{len(certificate.grid)}, certified {len(certificate.certified)}"),
        ("exit rule", _rule(evaluation)),
        ("data", certificate.data_sha256[:16]),
        ("head", certificate.head_sha256[:16]),
        ("model", certificate.model_fingerprint[:16]),
    )
    return Table(
        heading="Certificate",
        columns=("what", "value"),
        rows=rows,
        note="It holds for problems like the calibration problems, this model, this head and this sampling alone.",
    )


def reliability_figure(data: PageData) -> tuple[Figure, ...]:
    """Whether the head's consistency comes true; no figure where there is no boundary."""
    real = data.traces.is_boundary
    if not real.any():
        return ()
    predicted = data.signals[..., SIGNALS.index("consistency")][real].astype(np.float64)
    result = reliability(predicted, data.traces.matches_at[:, :-1][real])
    told = ", ".join(f"{p:.2f} came true {o:.2f}" for p, o in zip(result.predicted, result.observed, strict=True))
    return (
        Figure(
            heading="Reliability of the consistency signal",
            svg=reliability_svg(
                result, x_label="predicted: exiting here keeps the answer", y_label="share that kept it"
            ),
            caption=f"At all paragraph ends of the test split: {result.caption}",
            alt=f"Reliability diagram; predictions of {told}.",
        ),
    )


def training_figure(training: TrainReport) -> Figure:
    """The course of the head's training."""
    losses = {name: [entry[name] for entry in training.history] for name in ("train", "validation")}
    best = training.history[training.best_epoch]["validation"]
    return Figure(
        heading="Training of the head",
        svg=training_curves_svg(losses, kept=training.best_epoch, y_label="weighted loss"),
        caption=(
            f"{training.rows[0]:,} training rows and {training.rows[1]:,} validation rows. Train: mean over the "
            "epoch's steps; validation: after the epoch."
        ),
        alt=(
            f"Training and validation loss over {len(training.history)} epochs; the lowest validation loss is "
            f"{best:.3f}, after epoch {training.best_epoch + 1}."
        ),
    )


def example_views(
    evaluation: Evaluation, data: PageData, decode: Callable[[Sequence[int]], str]
) -> tuple[TraceView, ...]:
    """The chosen examples."""
    return tuple(
        trace_view(
            example,
            data.records[example.place],
            data.smoothed[example.place],
            policy=evaluation.policy,
            exit_index=int(evaluation.exit_index[example.place]),
            decode=decode,
        )
        for example in choose(data.traces, evaluation.exit_index)
    )


def stage_table(stages: Mapping[str, JSON]) -> Table:
    """What each stage took and made."""
    notes = [(name, JsonFields.of(note, where=f"stage {name}")) for name, note in stages.items()]
    return Table(
        heading="Stages",
        columns=("stage", "seconds", "made", "sha256"),
        rows=tuple(
            (name, f"{note.number('seconds'):.1f}", note.text("artifact"), note.text("sha256")[:16])
            for name, note in notes
        ),
    )


def live_table(live: Mapping[str, JSON]) -> Table:
    """The figures of the live run."""
    plain = {name: value for name, value in live.items() if not isinstance(value, dict | list)}
    return Table(
        heading="Live run",
        columns=("what", "value"),
        rows=tuple((name.replace("_", " "), _plain(value)) for name, value in plain.items()),
        note="The engine on test problems, with exits and without, against what the replay said, token for token.",
    )


def _result_row(row: MethodRow, intervals: RowIntervals) -> tuple[str | Cell, ...]:
    return (
        words(row.method),
        Cell(text=_percent(row.accuracy), detail=_brackets(intervals.accuracy)),
        f"{row.think_tokens_mean:.1f}",
        f"{row.tokens_mean:.1f}",
        Cell(text=_percent(row.captured_savings), detail=_brackets(intervals.captured_savings)),
        Cell(text=_percent(row.lost_correct, 2), detail=f"bound {_percent(row.lost_correct_ucb95, 2)}"),
        "n/a" if math.isnan(row.time_to_valid_answer_s) else f"{row.time_to_valid_answer_s:.3f} s",
        f"{row.valid_answers_per_s:.2f}",
    )


def _rule(evaluation: Evaluation) -> str:
    policy = evaluation.policy
    if policy.score is not None:
        return f"logistic score of {', '.join(policy.score.signals)} above {policy.score.threshold:.4f}"
    return f"{policy.predicate} of {', '.join(f'{name} ({bound:.4g})' for name, bound in policy.thresholds.items())}"


def _percent(value: float, digits: int = 1) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}%}"


def _brackets(interval: Interval) -> str:
    return f"[{_percent(interval.low)}, {_percent(interval.high)}]"


def _plain(value: JSON) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

"""The result report: `report.json`, `report.md` and the Pareto plot, and the thresholds that the demo must meet."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ace_learn.artifacts import JSON, JsonFields, write_json, write_text
from ace_learn.evaluate.bootstrap import Interval
from ace_learn.evaluate.compare import Evaluation
from ace_learn.evaluate.metrics import LatencyModel, json_of

MAX_ACCURACY_DROP = 0.015
MIN_CAPTURED_SAVINGS = 0.65
MIN_PROBLEMS = 1000
MIN_LIVE = 200


class Finding(NamedTuple):
    """A comparison in one sentence, with method names in backticks; a caution is one that must not be overlooked."""

    text: str
    caution: bool = False


def write_report(
    folder: Path,
    evaluation: Evaluation,
    *,
    live: Mapping[str, JSON],
    stages: Mapping[str, JSON],
    latency: LatencyModel,
    notes: Mapping[str, JSON] | None = None,
) -> dict[str, JSON]:
    """Write `report.json`, `report.md` and `pareto.png` into an existing folder.

    Args:
        folder: where to write.
        evaluation: results on the test split.
        live: figures of the live run; `n` and `equals_replay` are read by `demo_checks`.
        stages: what made the report: hash and seconds of each stage.
        latency: the measured latency model behind the two time columns.
        notes: further entries of `report.json`.

    Returns:
        The content of `report.json`.
    """
    from ace_learn.evaluate.plots import plot_pareto

    report = report_json(evaluation, live=live, stages=stages, latency=latency, notes=notes or {})
    plot_pareto(folder / "pareto.png", evaluation)
    write_text(folder / "report.md", report_markdown(evaluation, live=live, latency=latency))
    write_json(folder / "report.json", report)  # last: who finds it finds the others
    return report


def report_json(
    evaluation: Evaluation,
    *,
    live: Mapping[str, JSON],
    stages: Mapping[str, JSON],
    latency: LatencyModel,
    notes: Mapping[str, JSON],
) -> dict[str, JSON]:
    """The content of `report.json`; a figure that does not exist is null."""
    intervals: dict[str, JSON] = {name: json_of(interval._asdict()) for name, interval in evaluation.intervals.items()}
    curves: dict[str, JSON] = {
        name: {"tokens_mean": curve.tokens_mean.tolist(), "accuracy": curve.accuracy.tolist()}
        for name, curve in evaluation.curves.items()
    }
    tuned: dict[str, JSON] = {
        name: {"threshold": choice.threshold, "tests": choice.result.message}
        for name, choice in evaluation.tuned.items()
    }
    comparisons: dict[str, JSON] = {
        "against_budgets": json_of(evaluation.against_budgets._asdict()),
        "against_full_accuracy": json_of(evaluation.against_full._asdict()),
        "against_full_mcnemar": json_of(evaluation.against_full_mcnemar._asdict()),
        "best_scalar": evaluation.best_scalar,
        "against_best_scalar_savings": json_of(evaluation.against_scalar._asdict()),
        "scalar_is_as_good": evaluation.scalar_is_as_good,
    }
    return {
        "rows": [row.to_json() for row in evaluation.rows],
        "live": dict(live),
        "stages": dict(stages),
        "intervals": intervals,
        "comparisons": comparisons,
        "tuned": tuned,
        "policy": evaluation.policy.to_json(),
        "latency_model": {"prefill_s": latency.prefill_s, "per_token_s": latency.per_token_s},
        "curves": curves,
        **notes,
    }


def report_markdown(evaluation: Evaluation, *, live: Mapping[str, JSON], latency: LatencyModel) -> str:
    """A page with the table, what it was measured on, and the comparisons in words."""
    head = (
        "method", "accuracy", "think tokens", "tokens", "captured savings", "lost-correct (95% bound)",
        "time to valid answer", "valid answers/s",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in evaluation.rows:
        interval = evaluation.intervals[row.method]
        cells = (
            row.method,
            f"{row.accuracy:.1%} {_percent(interval.accuracy)}",
            f"{row.think_tokens_mean:.1f}",
            f"{row.tokens_mean:.1f}",
            f"{_number(row.captured_savings, '.1%')} {_percent(interval.captured_savings)}",
            f"{row.lost_correct:.2%} ({row.lost_correct_ucb95:.2%})",
            f"{_number(row.time_to_valid_answer_s, '.3f')} s",
            f"{row.valid_answers_per_s:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    live_lines = [f"- {name}: {value}" for name, value in live.items() if not isinstance(value, dict | list)]
    parts = [
        "# Report",
        f"{evaluation.rows[0].n} held-out problems. Brackets: paired bootstrap 95% intervals.",
        "\n".join(lines),
        "![accuracy over tokens](pareto.png)",
        "\n".join(f"- **{text}**" if caution else f"- {text}" for text, caution in findings(evaluation)),
        "Both time columns are modelled from two measured constants, not timed per request: seconds = "
        f"{latency.prefill_s:.4f} + {latency.per_token_s:.5f} x output tokens up to the commit.",
    ]
    if live_lines:
        parts.append("## Live run\n\n" + "\n".join(live_lines))
    return "\n\n".join(parts) + "\n"


def demo_checks(report: Mapping[str, JSON]) -> list[str]:
    """The demo's thresholds that a report violates, one sentence each; an empty list is a pass.

    Raises:
        ValueError: the report lacks what is to be checked.
    """
    fields = JsonFields.of(dict(report), where="report")
    rows = {row.text("method"): row for row in (JsonFields.of(row, where="row") for row in fields.items("rows"))}
    if not {"full", "learned"} <= set(rows):
        raise ValueError("the report has no rows for 'full' and 'learned'")
    learned, live = rows["learned"], fields.fields("live")
    drop = rows["full"].number("accuracy") - learned.number("accuracy")
    savings = learned.get("captured_savings")
    bound = fields.fields("comparisons").fields("against_budgets").number("lower_bound")
    checks = {
        f"learned accuracy is {100 * drop:.2f} points below full, allowed are {100 * MAX_ACCURACY_DROP}": (
            drop <= MAX_ACCURACY_DROP
        ),
        f"learned captured savings are {savings}, needed are {MIN_CAPTURED_SAVINGS}": (
            isinstance(savings, float | int) and savings >= MIN_CAPTURED_SAVINGS
        ),
        f"against fixed budgets at equal tokens the paired 95% lower bound is {bound:.4f}, not above 0": bound > 0,
        "the live run does not equal the replay": live.boolean("equals_replay"),
        f"replayed on {learned.integer('n')} problems, needed are {MIN_PROBLEMS}": learned.integer("n") >= MIN_PROBLEMS,
        f"live run on {live.integer('n')} problems, needed are {MIN_LIVE}": live.integer("n") >= MIN_LIVE,
    }
    return [sentence for sentence, passed in checks.items() if not passed]


def findings(evaluation: Evaluation) -> list[Finding]:
    """What the comparisons show, in sentences."""
    budgets, full, scalar = evaluation.against_budgets, evaluation.against_full, evaluation.against_scalar
    test = evaluation.against_full_mcnemar
    sentences = [
        f"Against fixed budgets at equal tokens ({budgets.tokens_mean:.1f}): {budgets.accuracy:.1%} against "
        f"{budgets.budget_accuracy:.1%}, difference {100 * budgets.difference:+.2f} points, paired 95% lower bound "
        f"{100 * budgets.lower_bound:+.2f}.",
        f"Against full thinking: accuracy {100 * full.estimate:+.2f} points {_points(full.interval)}; "
        f"{test.only_first} problems won, {test.only_second} lost, exact McNemar p = {test.p_value:.3g}.",
        f"Against the best scalar baseline at the same certified risk ({evaluation.best_scalar}): captured savings "
        f"{100 * scalar.estimate:+.1f} points {_points(scalar.interval)}.",
    ]
    cautions = []
    if evaluation.scalar_is_as_good:
        cautions.append(
            f"The learned policy is not shown to capture more than `{evaluation.best_scalar}`, which needs no head."
        )
    if evaluation.policy.predicate == "never":
        cautions.append("Nothing was certified: the learned policy is `never` and equals full thinking.")
    return [*map(Finding, sentences), *(Finding(text, caution=True) for text in cautions)]


def _number(value: float, form: str) -> str:
    return "n/a" if math.isnan(value) else format(value, form)


def _percent(interval: Interval) -> str:
    return f"[{_number(interval.low, '.1%')}, {_number(interval.high, '.1%')}]"


def _points(interval: Interval) -> str:
    return f"[{_number(100 * interval.low, '+.2f')}, {_number(100 * interval.high, '+.2f')}]"

"""What came of a data set that was sent to a server: the figures, in lines and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from ace_learn.engines.answer_reader import ServedOutput
from ace_learn.evaluate.metrics import LatencyModel, answer_times
from ace_learn.evaluate.page import Page, Prose, Section, Table, write_page


@dataclass(kw_only=True)
class Arm:
    """All outputs of one way of asking."""

    exits: bool
    outputs: dict[int, ServedOutput] = field(default_factory=dict)
    """By the number of the problem."""
    correct: dict[int, bool] = field(default_factory=dict)
    elapsed_s: float = 0.0
    """How long the server was busy with them."""


class ServedRun(NamedTuple):
    """What came of a run."""

    exit: Arm
    full: Arm | None
    """None without `compare`."""
    families: tuple[str, ...]
    """Kind of each problem."""
    past_commit: tuple[int, ...] | None
    """Tokens that the server generated past each commit, by its own count; None where it does not say."""


def summary(run: ServedRun) -> str:
    """The figures of a run, a line each."""
    lines = [_arm_line("with the contract exit", run.exit)]
    if run.full is not None:
        lines += [_arm_line("read to the end", run.full), *_comparison_lines(run)]
    ended = [output for output in run.exit.outputs.values() if output.finish_reason == "contract"]
    if ended:
        received = [output.tokens - output.kept_tokens for output in ended]
        counted = "/".join(sorted({output.counted_by for output in ended}))
        lines.append(
            f"tokens received past the commit: median {median(received):g}, max {max(received)} "
            f"({len(ended)} requests, counted by {counted}{', an estimate' if 'chunks' in counted else ''})"
        )
    if run.past_commit:
        lines.append(
            f"tokens generated past the commit: median {median(run.past_commit):g}, max {max(run.past_commit)} "
            f"({len(run.past_commit)} requests one at a time, by the server's own count)"
        )
    else:
        lines.append("tokens generated past the commit: unknown; the server was not asked, does not say, or is busy")
    return "\n".join(lines)


def _arm_line(name: str, arm: Arm) -> str:
    outputs, correct = _ordered(arm)
    valid = np.array([output.answer is not None for output in outputs])
    seconds = np.array([output.seconds for output in outputs])
    times = answer_times(seconds, valid, correct, elapsed_s=arm.elapsed_s)
    ended = [output for output in outputs if output.finish_reason not in ("error", "timeout")]
    repeated = sum(output.attempts - output.calls for output in ended)
    return (
        f"{name}: {len(outputs)} problems, {valid.mean():.1%} valid, {correct.mean():.1%} correct, "
        f"{times.valid_answers_per_s:.3g} valid answers/s, {times.time_to_valid_answer_s:.3f} s to a valid answer, "
        f"{times.engine_seconds_per_solved:.3f} s per solved problem, "
        f"{mean(output.tokens for output in outputs):.1f} tokens per problem, "
        f"{len(outputs) - len(ended)} failed, {repeated} calls repeated"
    )


class SpeedUp(NamedTuple):
    """Time per request to the end over time per request with the exit, for some problems."""

    name: str
    n: int
    full_s: float
    """Mean seconds of the requests that were read to the end."""
    exit_s: float
    """Mean seconds of those with the exit."""
    full_tokens: float
    exit_tokens: float
    predicted_exit_s: float
    """What the latency model says of the requests with the exit."""
    predicted: float
    """The speed-up by the latency model."""
    same: int
    """Problems with the same answer both ways."""

    @property
    def measured(self) -> float:
        """The speed-up by the clock."""
        return self.full_s / self.exit_s


class Comparison(NamedTuple):
    """Measured speed-ups beside those that a latency model predicts, which knows the plain requests alone."""

    latency: LatencyModel
    rows: tuple[SpeedUp, ...]
    """All problems, then each kind, where there are several."""


def compare(run: ServedRun) -> Comparison | None:
    """The speed-ups of a run, over the problems that have an output both ways; None where there is none."""
    if run.full is None:
        return None
    pairs = {
        key: (output, run.full.outputs[key])
        for key, output in sorted(run.exit.outputs.items())
        if output.error is None and run.full.outputs[key].error is None and run.full.outputs[key].tokens
    }
    if not pairs:
        return None
    latency = LatencyModel.fit(
        [long.tokens for _, long in pairs.values()], [long.seconds for _, long in pairs.values()]
    )
    kinds = {family: [pairs[key] for key in pairs if run.families[key] == family] for family in run.families}
    groups = {"all": list(pairs.values()), **(kinds if len(kinds) > 1 else {})}
    return Comparison(latency, tuple(_speed_up(name, group, latency) for name, group in groups.items() if group))


def _speed_up(name: str, pairs: Sequence[tuple[ServedOutput, ServedOutput]], latency: LatencyModel) -> SpeedUp:
    kept, received = (np.array([getattr(short, field) for short, _ in pairs]) for field in ("kept_tokens", "tokens"))
    full_tokens = np.array([long.tokens for _, long in pairs])
    predicted_exit_s = float(latency.seconds(kept, late=received - kept).mean())
    return SpeedUp(
        name=name,
        n=len(pairs),
        full_s=mean(long.seconds for _, long in pairs),
        exit_s=mean(short.seconds for short, _ in pairs),
        full_tokens=float(full_tokens.mean()),
        exit_tokens=float(received.mean()),
        predicted_exit_s=predicted_exit_s,
        predicted=float(latency.seconds(full_tokens).mean()) / predicted_exit_s,
        same=sum(short.answer == long.answer for short, long in pairs),
    )


def _comparison_lines(run: ServedRun) -> list[str]:
    comparison = compare(run)
    if comparison is None:
        return ["speed-up: unknown, no problem has an output both ways"]
    latency, whole = comparison.latency, comparison.rows[0]
    return [
        f"time per request: {whole.measured:.2f}x faster measured, {whole.predicted:.2f}x predicted by "
        f"{latency.prefill_s:.4f} s + {latency.per_token_s:.5f} s per token, fitted to the requests read to the end",
        f"the same answer both ways: {whole.same} of {whole.n}",
    ]


def _ordered(arm: Arm) -> tuple[list[ServedOutput], np.ndarray]:
    keys = sorted(arm.outputs)
    return [arm.outputs[key] for key in keys], np.array([arm.correct[key] for key in keys])


def write_report(path: Path, run: ServedRun) -> None:
    """Writes a page with the figures of a run, measured speed-ups beside predicted ones.

    Raises:
        OSError: The page cannot be written.
    """
    comparison = compare(run)
    sections: list[Section] = [] if comparison is None else [_speed_up_table(comparison)]
    page = Page(
        title="Contract exits on a server",
        intro=("Each problem was sent with the contract exit, which closes the stream where the answer is complete.",),
        sections=(*sections, Prose(heading="Figures", paragraphs=tuple(summary(run).split("\n")))),
    )
    write_page(path, page)


def _speed_up_table(comparison: Comparison) -> Table:
    latency = comparison.latency
    return Table(
        heading="Speed-up, measured and predicted",
        columns=(
            "problems", "n", "tokens to the end", "tokens with exit", "seconds to the end", "seconds with exit",
            "predicted", "speed-up", "predicted speed-up",
        ),
        rows=tuple(
            (
                row.name, str(row.n), f"{row.full_tokens:.1f}", f"{row.exit_tokens:.1f}", f"{row.full_s:.3f}",
                f"{row.exit_s:.3f}", f"{row.predicted_exit_s:.3f}", f"{row.measured:.2f}x", f"{row.predicted:.2f}x",
            )
            for row in comparison.rows
        ),
        note=(
            f"Means per request. Predicted: T = P + c (tau + delta) with P = {latency.prefill_s:.4f} s and "
            f"c = {latency.per_token_s:.5f} s, a line through the requests read to the end; tau are the tokens up to "
            "the one that completes the answer, delta those received behind it. Seconds hold for the "
            "concurrency of this run."
        ),
        highlight=("all",),
    )  # fmt: skip

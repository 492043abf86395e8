"""What a training run reports: numbers, and a picture of its course."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.heads.metrics import HeadMetrics
from ace_learn.heads.module import EpochLosses


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """The outcome of a training run; `metrics.json` of the head folder.

    Attributes:
        head: Validation metrics of the head.
        baseline: Validation metrics of ridge and logistic regression on the same features.
        history: The objective after each epoch.
        best_epoch: The epoch whose weights were kept, counted from 0.
        rows: Training and validation rows.
    """

    head: HeadMetrics
    baseline: HeadMetrics
    history: tuple[EpochLosses, ...]
    best_epoch: int
    rows: tuple[int, int]

    def to_json(self) -> dict[str, JSON]:
        """The report as a JSON object."""
        return {
            "head": self.head.to_json(),
            "baseline": self.baseline.to_json(),
            "history": [{"train": entry["train"], "validation": entry["validation"]} for entry in self.history],
            "best_epoch": self.best_epoch,
            "rows": {"train": self.rows[0], "validation": self.rows[1]},
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> TrainReport:
        """Reads what `to_json` gave.

        Raises:
            ValueError: A field is missing or wrong.
        """
        entries = [JsonFields.of(entry, where=f"{fields.where}: history") for entry in fields.items("history")]
        rows = fields.fields("rows")
        return cls(
            head=HeadMetrics.from_json(fields.get("head"), where=f"{fields.where}: head"),
            baseline=HeadMetrics.from_json(fields.get("baseline"), where=f"{fields.where}: baseline"),
            history=tuple(
                EpochLosses(train=entry.number("train"), validation=entry.number("validation")) for entry in entries
            ),
            best_epoch=fields.integer("best_epoch"),
            rows=(rows.integer("train"), rows.integer("validation")),
        )

    def lines(self) -> list[str]:
        """The report as a small table for a terminal."""
        lines = [f"best epoch {self.best_epoch + 1} of {len(self.history)}, {self.rows[0]:,} + {self.rows[1]:,} rows"]
        lines.append(f"{'validation':<28}{'head':>8}{'linear':>8}")
        for signal in ("confidence", "progress", "remaining", "remaining_log"):
            for measure in ("r2", "spearman"):
                lines.append(self._line(signal, measure))
        return [*lines, self._line("consistency", "auc"), self._line("consistency", "ece")]

    def _line(self, signal: str, measure: str) -> str:
        values = [getattr(getattr(side, signal), measure) for side in (self.head, self.baseline)]
        cells = "".join(f"{'-' if value is None else format(value, '.3f'):>8}" for value in values)
        return f"{f'{signal} {measure}':<28}{cells}"


def draw_history(path: Path, history: Sequence[EpochLosses], *, best_epoch: int) -> None:
    """Draws the training curve as PNG.

    Args:
        path: The file.
        history: The objective after each epoch.
        best_epoch: The epoch whose weights were kept, counted from 0.

    Raises:
        OSError: The file cannot be written.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    epochs = range(1, len(history) + 1)
    axes.plot(epochs, [entry["train"] for entry in history], marker=".", label="train, mean over the epoch's steps")
    axes.plot(epochs, [entry["validation"] for entry in history], marker=".", label="validation, after the epoch")
    axes.axvline(best_epoch + 1, color="grey", linestyle=":", label="weights kept")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel("weighted loss")
    axes.legend()
    figure.savefig(path, dpi=120)

"""What a training run reports: numbers, and a picture of its course."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.heads.history import EpochLosses, epoch_from_json, epoch_to_json
from ace_learn.heads.metrics import HeadMetrics


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """The outcome of a training run; `metrics.json` of the head folder.

    Attributes:
        head: Validation metrics of the head.
        baseline: Validation metrics of ridge and logistic regression on the same features.
        history: Losses and weights of each epoch.
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
            "history": [epoch_to_json(epoch) for epoch in self.history],
            "best_epoch": self.best_epoch,
            "rows": {"train": self.rows[0], "validation": self.rows[1]},
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> TrainReport:
        """Reads what `to_json` gave.

        Raises:
            ValueError: A field is missing or wrong.
        """
        rows = fields.fields("rows")
        return cls(
            head=HeadMetrics.from_json(fields.get("head"), where=f"{fields.where}: head"),
            baseline=HeadMetrics.from_json(fields.get("baseline"), where=f"{fields.where}: baseline"),
            history=tuple(
                epoch_from_json(epoch, where=f"{fields.where}: history") for epoch in fields.items("history")
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
    """Draws the training curves as PNG: the objective, each signal's loss, and the weights where they moved.

    Args:
        path: The file.
        history: Losses and weights of each epoch, at least one.
        best_epoch: The epoch whose weights were kept, counted from 0.

    Raises:
        OSError: The file cannot be written.
    """
    panels = [_draw_objective, _draw_losses, *([_draw_weights] if history[0]["gradient_norms"] else [])]
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes, history)
        axes.axvline(best_epoch + 1, color="grey", linestyle=":", label="epoch kept")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("epoch")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_objective(axes: Axes, history: Sequence[EpochLosses]) -> None:
    epochs = range(1, len(history) + 1)
    moving = " (moving weights)" if history[0]["gradient_norms"] else ""
    axes.plot(epochs, [epoch["train"] for epoch in history], marker=".", label=f"train, mean over steps{moving}")
    axes.plot(epochs, [epoch["validation"] for epoch in history], marker=".", label="validation (fixed weights)")
    axes.set_ylabel("weighted loss")


def _draw_losses(axes: Axes, history: Sequence[EpochLosses]) -> None:
    """Solid: training; dashed: validation. Losses differ by orders of magnitude, hence the logarithmic axis."""
    epochs = range(1, len(history) + 1)
    for signal in history[0]["train_losses"]:
        (line,) = axes.plot(epochs, [epoch["train_losses"][signal] for epoch in history], label=signal)
        validation = [epoch["validation_losses"][signal] for epoch in history]
        axes.plot(epochs, validation, color=line.get_color(), linestyle="--")
    axes.set_yscale("log")
    axes.set_ylabel("loss of the signal (dashed: validation)")


def _draw_weights(axes: Axes, history: Sequence[EpochLosses]) -> None:
    epochs = range(1, len(history) + 1)
    for signal in history[0]["weights"]:
        axes.plot(epochs, [epoch["weights"][signal] for epoch in history], marker=".", label=signal)
    axes.set_yscale("log")
    axes.set_ylabel("weight in training, mean over steps")

"""What a draft's training run reports."""

from __future__ import annotations

from dataclasses import dataclass

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.drafts.losses import TokenSums
from ace_learn.heads.history import EpochLosses, epoch_from_json, epoch_to_json
from ace_learn.heads.metrics import HeadMetrics


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """How well an unrolled step does on the validation split, teacher-forced."""

    loss: float
    """Mean of m * KL(q / m || p), nats: `ace_learn.drafts.losses`."""
    acceptance: float
    """Mean probability that a sampled draft is accepted at temperature 1."""
    agreement: float
    """Share of rows where draft and target have the same most probable token."""

    def to_json(self) -> dict[str, JSON]:
        """The metrics as a JSON object."""
        return {"loss": self.loss, "acceptance": self.acceptance, "agreement": self.agreement}

    @classmethod
    def from_json(cls, value: JSON, *, where: str) -> StepMetrics:
        """Reads what `to_json` gave."""
        fields = JsonFields.of(value, where=where)
        return cls(
            loss=fields.number("loss"), acceptance=fields.number("acceptance"), agreement=fields.number("agreement")
        )


@dataclass(frozen=True, kw_only=True)
class DraftMetrics:
    """A draft on the validation split, teacher-forced.

    Attributes:
        steps: Of each unrolled step.
        acceptance_length: Estimated tokens of one verification with as many drafts as there are steps.
        signals: Of the signal rows, over the tokens that have targets; None without signal rows.
    """

    steps: tuple[StepMetrics, ...]
    acceptance_length: float
    signals: HeadMetrics | None

    @classmethod
    def of(cls, sums: TokenSums, signals: HeadMetrics | None) -> DraftMetrics:
        """The means of sums."""
        parts = zip(*((part / sums.rows.clamp_min(1)).tolist() for part in sums[:3]), strict=True)
        steps = tuple(StepMetrics(loss=loss, acceptance=a, agreement=top) for loss, a, top in parts)
        return cls(steps=steps, acceptance_length=sums.acceptance_length(), signals=signals)

    def to_json(self) -> dict[str, JSON]:
        """The metrics as a JSON object."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "acceptance_length": self.acceptance_length,
            "signals": None if self.signals is None else self.signals.to_json(),
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> DraftMetrics:
        """Reads what `to_json` gave."""
        signals = fields.get("signals")
        return cls(
            steps=tuple(StepMetrics.from_json(step, where=f"{fields.where}: steps") for step in fields.items("steps")),
            acceptance_length=fields.number("acceptance_length"),
            signals=None if signals is None else HeadMetrics.from_json(signals, where=f"{fields.where}: signals"),
        )


@dataclass(frozen=True, kw_only=True)
class DraftReport:
    """The outcome of a run; `metrics.json` of the draft folder.

    Attributes:
        draft: Validation metrics of the draft that was kept.
        history: Losses and weights of each epoch; the tasks are `token` and the signals.
        best_epoch: The epoch whose weights were kept, counted from 0.
        traces: Training and validation traces.
        cut: How many of all traces were cut at max_tokens, or left out since their prompt is that long.
        parameters: Numbers that the draft is made of; what it shares with the target is not counted.
        coverage: Share of the training text's output tokens that the draft can propose.
    """

    draft: DraftMetrics
    history: tuple[EpochLosses, ...]
    best_epoch: int
    traces: tuple[int, int]
    cut: int
    parameters: int
    coverage: float

    def to_json(self) -> dict[str, JSON]:
        """The report as a JSON object."""
        return {
            "draft": self.draft.to_json(),
            "history": [epoch_to_json(epoch) for epoch in self.history],
            "best_epoch": self.best_epoch,
            "traces": {"train": self.traces[0], "validation": self.traces[1], "cut": self.cut},
            "parameters": self.parameters,
            "coverage": self.coverage,
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> DraftReport:
        """Reads what `to_json` gave.

        Raises:
            ValueError: A field is missing or wrong.
        """
        traces = fields.fields("traces")
        return cls(
            draft=DraftMetrics.from_json(fields.fields("draft")),
            history=tuple(
                epoch_from_json(epoch, where=f"{fields.where}: history") for epoch in fields.items("history")
            ),
            best_epoch=fields.integer("best_epoch"),
            traces=(traces.integer("train"), traces.integer("validation")),
            cut=traces.integer("cut"),
            parameters=fields.integer("parameters"),
            coverage=fields.number("coverage"),
        )

    def lines(self) -> list[str]:
        """The report as a small table for a terminal."""
        cut = f" ({self.cut:,} cut)" if self.cut else ""
        lines = [
            f"best epoch {self.best_epoch + 1} of {len(self.history)}, {self.traces[0]:,} + {self.traces[1]:,} traces"
            f"{cut}, {self.parameters:,} parameters",
            f"{'validation, draft token':<28}{'loss':>8}{'accept':>8}{'top-1':>8}",
        ]
        for number, step in enumerate(self.draft.steps, start=1):
            lines.append(f"{number:<28}{step.loss:>8.3f}{step.acceptance:>8.3f}{step.agreement:>8.3f}")
        lines.append(f"{'tokens per verification':<28}{self.draft.acceptance_length:>8.2f}   (teacher-forced estimate)")
        signals = self.draft.signals
        if signals is not None:
            shown = {
                "confidence r2": signals.confidence.r2,
                "progress r2": signals.progress.r2,
                "remaining_log r2": signals.remaining_log.r2,
                "consistency auc": signals.consistency.auc,
            }
            lines += [f"{name:<28}{'-' if value is None else format(value, '.3f'):>8}" for name, value in shown.items()]
        return lines

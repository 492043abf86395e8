"""Which features predict that a draft is accepted, and how the online estimator does on streams of real decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from ace_learn.artifacts import JSON, ProvenanceRecorder, write_json, write_text
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.speculation.events import FEATURES, LOSSLESS, Steps, collect, hidden_states
from ace_learn.evaluate.speculation.predictors import Events, ece, fit, fit_head, quality
from ace_learn.evaluate.speculation.setting import Pair, SpeculationSetting
from ace_learn.evaluate.speculation.tables import feature_table, stream_table, workload_table
from ace_learn.reasoner.problems import FAMILIES
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator


@dataclass(frozen=True, kw_only=True)
class FeatureStudy:
    """A recipe of `python -m ace_learn.bench acceptance`."""

    setting: SpeculationSetting = SpeculationSetting()
    """Target, drafter and problems."""
    problems: int = 256
    """Problems of the main set of events; half of them fit, half of them test."""
    workload_problems: int = 64
    """Problems of each workload (a family of the embedded reasoner, or a temperature)."""
    temperature: float = 1.0
    """Sampling temperature."""
    workload_temperatures: list[float] = field(default_factory=lambda: [0.6, 1.3])
    """Other temperatures, as workloads."""
    distorted: float = 0.5
    """Temperature that the drafter samples with in the distorted copy of the events."""
    stream_batch: int = 32
    """Verify steps that the estimator observes at a time."""
    refit_interval: int = 10
    """Observations between its refits; few, since the streams are short."""
    forgettings: list[float] = field(default_factory=lambda: [0.0, 0.5, 0.9, 1.0])
    """Forgetting factors to compare after a switch of workload."""
    forced: float = 0.2
    """Share of steps whose first row is forced in the poisoned stream."""
    batch_size: int = 128
    """Requests decoded together."""
    output: Path | None = None
    """Folder for table.md and results.json."""

    def __post_init__(self) -> None:
        """Checks the values."""
        counts = (self.problems // 2, self.workload_problems, self.stream_batch, self.refit_interval, self.batch_size)
        if min(counts) < 1 or min(self.temperature, self.distorted) <= 0.0 or not 0.0 <= self.forced < 1.0:
            raise ValueError("need counts >= 1, temperatures > 0 and 0 <= forced < 1")


def study_features(config: FeatureStudy) -> dict[str, JSON]:
    """Collects events, fits every predictor and runs the estimator; prints, returns and optionally writes the tables.

    Raises:
        ValueError: A model cannot be loaded.
    """
    with ProvenanceRecorder() as recorder:
        pair = Pair(config.setting)
        _, requests = pair.problems(config.problems)
        steps, outputs = collect(pair, requests, temperature=config.temperature, batch_size=config.batch_size)
        states = hidden_states(pair.drafter(Sampling()), pair.target, requests, outputs, steps)
        distorted, _ = collect(
            pair,
            requests,
            temperature=config.temperature,
            draft_temperature=config.distorted,
            batch_size=config.batch_size,
        )
        results: dict[str, JSON] = {
            "steps": len(steps.request),
            "features": compare_features(steps, states),
            "workloads": _workloads(pair, config),
            "streams": _streams(steps, distorted, config),
        }
        tables = "\n\n".join((feature_table(results), workload_table(results), stream_table(results)))
        print(tables)
        if config.output is not None:
            write_text(config.output / "table.md", tables + "\n")
            write_json(config.output / "results.json", results)
            recorder.write(config.output)
    return results


@runtime_checkable
class _NewEstimator(Protocol):
    """Makes estimators that differ in their memory."""

    def __call__(
        self, forgetting: float = 0.0, *, separate: bool = False, halve: bool = False
    ) -> OnlineAcceptanceEstimator:
        """An estimator with common starting values."""
        ...


class _Flat(NamedTuple):
    """Judged drafts of steps, one a row."""

    events: Events
    features: Float[ndarray, "n C"]
    place: tuple[Int[ndarray, " n"], Int[ndarray, " n"]]

    @classmethod
    def of(cls, steps: Steps) -> _Flat:
        row, position = np.nonzero(steps.judged())
        events = Events(position, steps.labels()[row, position])
        return cls(events, steps.features[row, position].astype(np.float64), (row, position))


def compare_features(steps: Steps, states: Float[ndarray, "s K H"] | None) -> dict[str, JSON]:
    """Quality of every predictor on the second half of the requests, fitted on the first."""
    width = steps.features.shape[1]
    first = steps.request < np.median(np.unique(steps.request))
    train, test = _Flat.of(steps.rows(np.flatnonzero(first))), _Flat.of(steps.rows(np.flatnonzero(~first)))
    predicted = {"max, unfitted": test.features[:, FEATURES.index("max")]}
    for column, name in enumerate(FEATURES):
        model = fit(train.features[:, column], train.events, width)
        predicted[f"{name}, fitted"] = model(test.features[:, column], test.events.position)
    if states is not None:
        known, asked = (states[mask][flat.place].astype(np.float32) for mask, flat in ((first, train), (~first, test)))
        predicted["confidence head"] = fit_head(known, train.events, width, asked, test.events.position)
        known, asked = (np.hstack((s, flat.features[:, :1])) for s, flat in ((known, train), (asked, test)))
        predicted["confidence head, with logit_max"] = fit_head(known, train.events, width, asked, test.events.position)
    return {
        name: {
            "lossless": name.split(",")[0] in (*LOSSLESS, "confidence head"),
            **quality(test.events, values),
            "by_position": [_at(test.events, values, k) for k in range(width)],
        }
        for name, values in predicted.items()
    }


def _at(events: Events, predicted: Float[ndarray, " n"], position: int) -> dict[str, JSON] | None:
    here = events.position == position
    return quality(Events(events.position[here], events.label[here]), predicted[here]) if here.any() else None


def _workloads(pair: Pair, config: FeatureStudy) -> dict[str, JSON]:
    """Slope and intercepts of logit(max p), fitted to each workload and to the two halves of its traces."""
    asked: dict[str, tuple[list[str] | None, float]] = {}
    if config.setting.task.name == "reasoner":
        asked |= {f"family {family}": ([family], config.temperature) for family in FAMILIES}
    asked |= {f"temperature {t:g}": (None, t) for t in config.workload_temperatures}
    found: dict[str, JSON] = {}
    for name, (families, temperature) in asked.items():
        _, requests = pair.problems(config.workload_problems, families=families)
        steps, _ = collect(pair, requests, temperature=temperature, batch_size=config.batch_size)
        start = {request.key: len(request.prompt_ids) for request in requests}
        depth = steps.length - np.array([start[int(key)] for key in steps.request])
        parts = {
            "all": np.full(len(depth), True),
            "early": depth < np.median(depth),
            "late": depth >= np.median(depth),
            "thinking": steps.thinking == 1,
            "answer": steps.thinking == 0,
        }
        found[name] = {part: _coefficients(steps.rows(np.flatnonzero(rows))) for part, rows in parts.items()}
    return found


def _coefficients(steps: Steps) -> JSON:
    if len(steps.request) < 20:
        return None
    flat = _Flat.of(steps)
    if flat.events.label.min() == flat.events.label.max():
        return None
    model = fit(flat.features[:, 0], flat.events, steps.features.shape[1])
    return {
        "slope": model.slope,
        "intercepts": model.intercepts.tolist(),
        "acceptance": float(flat.events.label.mean()),
        "labels": len(flat.events.label),
    }


class Stream(NamedTuple):
    """What the estimator predicted of steps, before it saw their labels."""

    predicted: Float[ndarray, "s K"]
    slope: float
    intercepts: list[float]


def run_stream(
    steps: Steps, estimator: OnlineAcceptanceEstimator, batch: int, mask: Int[ndarray, "s K"] | None = None
) -> Stream:
    """Feeds steps to an estimator, `batch` at a time."""
    predicted = []
    thinking = torch.from_numpy(steps.thinking == 1)
    for start in range(0, len(steps.request), batch):
        rows = slice(start, start + batch)
        features = torch.from_numpy(steps.features[rows, :, 0]).float()
        told = thinking[rows] if estimator.separate_answer else None
        predicted.append(estimator.predict(features, told).numpy())
        accepted, drafted = (torch.from_numpy(c[rows]) for c in (steps.accepted, steps.drafted))
        estimator.observe(
            features, accepted, drafted, None if mask is None else torch.from_numpy(mask[rows] == 1), told
        )
    values: list[float] = estimator.intercepts.flatten().tolist()
    return Stream(np.concatenate(predicted), float(estimator.slope), values)


def _streams(steps: Steps, distorted: Steps, config: FeatureStudy) -> dict[str, JSON]:
    """The estimator online: on both sets of events, after a switch between them, and with forced rows.

    Quality is that of the second half of a stream, in which the estimator has found its coefficients.
    """
    draw = np.random.default_rng(0)
    plain, other = (s.rows(draw.permutation(len(s.request))) for s in (steps, distorted))
    width = steps.features.shape[1]

    def estimator(forgetting: float = 0.0, *, separate: bool = False, halve: bool = False) -> OnlineAcceptanceEstimator:
        return OnlineAcceptanceEstimator(
            width,
            refit_interval=config.refit_interval,
            forgetting=forgetting,
            separate_answer=separate,
            halve_slope=halve,
        )

    results: dict[str, JSON] = {}
    for name, stream in (("as drafted", plain), ("distorted", other)):
        half = len(stream.request) // 2
        unfitted = _quality_of(stream, stream.features[:, :, FEATURES.index("max")].astype(np.float64), skip=half)
        figures: dict[str, JSON] = {"max, unfitted": unfitted}
        kinds = {
            "estimator": estimator(),
            "estimator, forgetting 0.9": estimator(0.9),
            "estimator, slope halved": estimator(halve=True),
            "estimator, slope halved, answer apart": estimator(separate=True, halve=True),
        }
        for kind, fresh in kinds.items():
            ran = run_stream(stream, fresh, config.stream_batch)
            figures[kind] = _quality_of(stream, ran.predicted, skip=half)
        results[name] = figures
    results["switch"] = {
        f"{g:g}": _recovery(plain, other, estimator(g), config.stream_batch) for g in config.forgettings
    }
    results["poisoned"] = _poisoned(plain, estimator, config, draw)
    return results


def _quality_of(steps: Steps, predicted: Float[ndarray, "s K"], skip: int = 0) -> dict[str, JSON]:
    flat = _Flat.of(steps)
    late = flat.place[0] >= skip
    events = Events(flat.events.position[late], flat.events.label[late])
    return quality(events, predicted[flat.place][late].astype(np.float64))


_WINDOW_STEPS = 640


def _recovery(first: Steps, then: Steps, estimator: OnlineAcceptanceEstimator, batch: int) -> list[JSON]:
    """ECE in windows of steps behind a switch of workload; the first entry is the window before it."""
    before = run_stream(first, estimator, batch).predicted
    after = run_stream(then, estimator, batch).predicted
    windows = [(first, before, len(first.request) - _WINDOW_STEPS)]
    windows += [(then, after, start) for start in range(0, min(len(then.request), 6 * _WINDOW_STEPS), _WINDOW_STEPS)]
    return [_window_ece(steps, predicted, max(0, start)) for steps, predicted, start in windows]


def _window_ece(steps: Steps, predicted: Float[ndarray, "s K"], start: int) -> float:
    flat = _Flat.of(steps)
    inside = (flat.place[0] >= start) & (flat.place[0] < start + _WINDOW_STEPS)
    return ece(flat.events.label[inside], predicted[flat.place][inside].astype(np.float64))


def _poisoned(
    steps: Steps, estimator: _NewEstimator, config: FeatureStudy, draw: np.random.Generator
) -> dict[str, JSON]:
    """A stream in which some first rows are forced, so that their drafts are rejected whatever they are."""
    forced = draw.random(len(steps.request)) < config.forced
    cut = steps._replace(accepted=np.where(forced, 0, steps.accepted))
    mask = np.repeat(~forced[:, None], steps.features.shape[1], axis=1).astype(int)
    results: dict[str, JSON] = {}
    for name, stream, masked in (("clean", steps, None), ("without mask", cut, None), ("with mask", cut, mask)):
        ran = run_stream(stream, estimator(0.9), config.stream_batch, masked)
        half = len(steps.request) // 2
        judged = _quality_of(steps, ran.predicted, skip=half)
        results[name] = {"slope": ran.slope, "intercepts": list[JSON](ran.intercepts), **judged}
    return results

"""What an ablation writes besides the page: `report.json` and `table.md`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from ace_learn.artifacts import JSON, config_json
from ace_learn.evaluate.ablation.config import AblateConfig
from ace_learn.evaluate.ablation.outcomes import Outcome
from ace_learn.evaluate.ablation.table import Figures, Measured
from ace_learn.evaluate.ablation.variants import REFERENCE, Plan
from ace_learn.evaluate.bootstrap import Interval
from ace_learn.evaluate.calibration import Certificate
from ace_learn.evaluate.compare import Curve, Splits, Tuned
from ace_learn.evaluate.examples import RULE, Example
from ace_learn.evaluate.replay import Replayed
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import ExitPolicy
from ace_learn.heads.report import TrainReport
from ace_learn.labels.records import TraceRecord

FORMAT = 1
"""Of `report.json`."""

LEVEL = 0.05
"""Of the adjusted p-values: what lies below is called a difference that holds for all comparisons together."""

_COLUMNS = (
    "variant", "captured savings", "against the reference", "tokens", "accuracy", "lost-correct (95% bound)",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """All that the reports show.

    Attributes:
        config: the recipe.
        plan: the variants and their groups.
        splits: the traces.
        outcomes: each variant after tuning.
        tuned: thresholds of the tuned baselines.
        results: test results of every method, by name: baselines, the reference, variants.
        measured: their figures.
        training: course and metrics of each head.
        curves: accuracy over tokens along the thresholds of the baselines `budget` and `confidence`.
        examples: the test problems to show.
        data_sha256: hash of the data set.
    """

    config: AblateConfig
    plan: Plan
    splits: Splits
    outcomes: Mapping[str, Outcome]
    tuned: Mapping[str, Tuned]
    results: Mapping[str, Replayed]
    measured: Measured
    training: Mapping[str, TrainReport]
    curves: Mapping[str, Curve]
    examples: tuple[Example, ...]
    data_sha256: str

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of what the first table shows: the baselines, the reference, and the policies of given thresholds."""
        variants = [name for name in self.plan.variants if name != REFERENCE]
        return tuple(name for name in self.results if name not in variants or name in self.plan.fixed)

    def group(self, key: str) -> tuple[str, ...]:
        """Names of a group's variants, the reference first."""
        return (REFERENCE, *(name for name in self.plan.groups[key] if name != REFERENCE))

    @property
    def held_fixed(self) -> tuple[str, ...]:
        """What all variants have in common, in sentences."""
        config, test = self.config, self.splits.test
        risk, policy = config.risk, config.reference.policy
        name = risk.loss.replace("_", "-")
        sure = "in expectation" if risk.method == "crc" else f"with confidence {1 - risk.delta:.0%}"
        sizes = ", ".join(f"{traces.num_problems} {traces.split}" for traces in self.splits)
        smoothing = "no smoothing" if policy.ewma == 1 else f"ewma {policy.ewma:g} over {policy.smooth_over}"
        return (
            f"Every variant is replayed exactly on the same stored probes ({sizes} problems; families "
            f"{', '.join(sorted(set(test.family)))}). Its candidates are fixed on the validation split, certified for "
            f"{name} <= {risk.alpha:.1%} {sure} on the calibration split ({risk.method.replace('_', ' ')}), and "
            "measured on the test split, which decides nothing. The baselines are tuned in the same way. Each "
            "certificate is one variant's own: it does not cover the choice of the best among them.",
            f"The reference reads {', '.join(policy.signals)} of the head {config.reference.head!r} through the "
            f"predicate {policy.predicate!r}, with {smoothing} and patience {policy.patience}. A variant differs from "
            "it in what its name says and in nothing else.",
            f"Brackets are 95% bootstrap intervals over the test problems ({config.replicates} resamples, the same for "
            "all), and differences are paired. They hold the policies and the heads fixed: another calibration split "
            "or another training seed would move the figures too. * marks a difference whose interval excludes 0; "
            f"** one that also holds for all {self.measured.comparisons} comparisons together (adjusted p < {LEVEL:g}, "
            "single-step max-t).",
        )


class Texts(NamedTuple):
    """What the test traces say.

    Attributes:
        records: the test traces as stored, in the order of the traces.
        decode: from token ids to text.
    """

    records: tuple[TraceRecord, ...]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceData:
    """What the page shows of the reference on the test split.

    Attributes:
        signals: unsmoothed signals of its head at the boundaries, nan on padding.
        smoothed: the signals as its policy saw them.
        texts: the traces, where the model that wrote them is known.
    """

    signals: Float32[ndarray, "n P S"]
    smoothed: Float32[ndarray, "n P S"]
    texts: Texts | None


def report_json(ablation: Ablation) -> dict[str, JSON]:
    """The content of `report.json`; docs/ablations.md describes it."""
    config, measured, problem = ablation.config, ablation.measured, ablation.splits.test.problem
    heads: dict[str, JSON] = {
        name: {"config": config_json(config.heads[name]), **ablation.training[name].to_json()} for name in config.heads
    }
    groups: dict[str, JSON] = {
        key: {"title": group.title, "variants": list(ablation.plan.groups[key])} for key, group in config.groups.items()
    }
    methods: dict[str, JSON] = {name: _method_json(ablation, name) for name in ablation.results}
    return {
        "format": FORMAT,
        "reference": REFERENCE,
        "held_fixed": list(ablation.held_fixed),
        "data": {
            "sha256": ablation.data_sha256,
            "splits": {traces.split: _split_json(traces) for traces in ablation.splits},
        },
        "risk": config_json(config.risk),
        "bootstrap": {"replicates": config.replicates, "seed": config.seed},
        "comparisons": {"count": measured.comparisons, "adjustment": "single-step max-t", "level": LEVEL},
        "groups": groups,
        "methods": methods,
        "heads": heads,
        "examples": {"rule": RULE, "problems": [int(problem[example.place]) for example in ablation.examples]},
    }


def _split_json(traces: Traces) -> dict[str, JSON]:
    names, counts = np.unique(np.array(traces.family), return_counts=True)
    return {
        "n": traces.num_problems,
        "excluded": traces.excluded,
        "full_accuracy": float(traces.full_correct.mean()),
        "families": dict(zip(names.tolist(), counts.tolist(), strict=True)),
    }


def _method_json(ablation: Ablation, name: str) -> dict[str, JSON]:
    families: dict[str, JSON] = {
        family: figures[name].to_json() for family, figures in ablation.measured.families.items()
    }
    figures: dict[str, JSON] = {"overall": ablation.measured.overall[name].to_json(), "families": families}
    if name not in ablation.plan.variants:
        tuned = ablation.tuned.get(name)
        tests: JSON = None if tuned is None else {"threshold": tuned.threshold, "message": tuned.result.message}
        return {"kind": "baseline", "tuned": tests, **figures}
    outcome = ablation.outcomes[name]
    return {
        "kind": "constants" if name in ablation.plan.fixed else "learned",
        "head": ablation.plan.variants[name].head,
        "message": outcome.message,
        "rule": {key: value for key, value in outcome.policy.to_json().items() if key not in ("certificate", "sha256")},
        "certificate": _certificate_json(outcome.policy),
        **figures,
    }


def _certificate_json(policy: ExitPolicy) -> JSON:
    """What was certified, without the grid; the whole of it stands in the variant's own file."""
    if policy.certificate is None:
        return None
    certificate = Certificate.from_json(policy.certificate)
    return {
        "loss": certificate.loss,
        "alpha": certificate.alpha,
        "delta": certificate.delta,
        "n": certificate.n,
        "losses": certificate.losses,
        "p_value": certificate.p_value,
        "candidates": len(certificate.grid),
        "certified": len(certificate.certified),
    }


def table_markdown(ablation: Ablation) -> str:
    """`table.md`: what was held fixed, the methods, one table per group, and one by family."""
    parts = ["# Ablation", *ablation.held_fixed, "## Methods", _table(ablation, ablation.methods)]
    for key, group in ablation.config.groups.items():
        parts += [f"## {group.title}", _table(ablation, ablation.group(key))]
    families = list(ablation.measured.families)
    rows = [family_row(ablation, name) for name in ablation.results]
    parts += [
        "## Captured savings by family",
        "Each family's own intervals; * marks a difference from the reference whose interval excludes 0 there.",
        markdown_table(("variant", "all", *families), rows),
    ]
    return "\n\n".join(parts) + "\n"


def family_row(ablation: Ablation, name: str) -> tuple[str, ...]:
    """A method's captured savings, overall and by family."""
    overall, families = ablation.measured.overall[name], ablation.measured.families
    cells = [percent(overall.captured_savings, overall.captured_savings_interval) + stars(overall)]
    for figures in families.values():
        own = figures[name]
        cells.append(percent(own.captured_savings, own.captured_savings_interval) + stars(own))
    return (label(ablation, name), *cells)


def _table(ablation: Ablation, names: Iterable[str]) -> str:
    rows = []
    for name in names:
        figures = ablation.measured.overall[name]
        rows.append(
            (
                label(ablation, name),
                percent(figures.captured_savings, figures.captured_savings_interval),
                difference(name, figures),
                f"{figures.tokens_mean:.1f}",
                percent(figures.accuracy, figures.accuracy_interval),
                f"{figures.lost_correct:.2%} ({figures.lost_correct_ucb95:.2%})",
            )
        )
    return markdown_table(_COLUMNS, rows)


def markdown_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown; bars in cells are escaped."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def label(ablation: Ablation, name: str) -> str:
    """A method's name, with a remark where nothing certifies."""
    tuned = ablation.tuned.get(name)
    never = name in ablation.outcomes and ablation.outcomes[name].policy.predicate == "never"
    return f"{name} (nothing certifies)" if never or (tuned is not None and tuned.threshold is None) else name


def stars(figures: Figures) -> str:
    """`*` where the difference from the reference excludes 0, `**` where it holds for all comparisons together."""
    if figures.adjusted_p < LEVEL and figures.savings_differ:
        return " **"
    return " *" if figures.savings_differ else ""


def difference(name: str, figures: Figures) -> str:
    """The savings difference in points, with its interval and stars."""
    if name == REFERENCE:
        return "-"
    estimate, interval = figures.savings_difference
    return f"{_points(estimate)} [{_points(interval.low)}, {_points(interval.high)}]{stars(figures)}"


def percent(value: float, interval: Interval) -> str:
    """A share with its interval."""
    return f"{_share(value)} [{_share(interval.low)}, {_share(interval.high)}]"


def _share(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.1%}"


def _points(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{100 * value:+.1f}"

"""How many tokens a verification gives with each drafter: real decoding, the same problems, paired comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import t as student
from tqdm import tqdm

from ace_learn.artifacts import JSON, ProvenanceRecorder, config_json, dump_config, write_json, write_text, writer_lock
from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.requests import Output, Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.bootstrap import Bootstrap, Interval, percentile_interval
from ace_learn.features import shard_folders
from ace_learn.labels.records import read_records
from ace_learn.models.target import Target, TargetConfig, load_target
from ace_learn.speculation.drafters import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class DraftStudyConfig:
    """Measures drafters on the problems of a data set that they were not trained on."""

    dataset: Path
    """The data set folder; its prompts and contracts are used."""
    output: Path
    """Folder to write: acceptance.json and acceptance.md."""
    target: TargetConfig
    """The model that verifies."""
    drafters: dict[str, DrafterConfig]
    """Drafters by name; the later ones are compared with the first."""
    against: dict[str, str] = field(default_factory=dict)
    """Drafters that are compared with another one than the first, by its name: pairs of training seeds, for instance.
    Two or more such pairs are also averaged, with intervals over problems and over pairs."""
    split: str = "test"
    """The split whose problems are decoded."""
    problems: int = 200
    """How many of them, the first ones."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    margin: float = 0.05
    """A drafter does not drop where the difference is above minus this many tokens, with 95% confidence."""
    max_new_tokens: int = 480
    """Cap on the output of a problem."""
    batch_size: int = 64
    """Requests decoded together."""
    replicates: int = 2000
    """Resamples of the problems."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range.
        """
        if not self.drafters or not self.temperatures:
            raise ValueError("name at least one drafter and one temperature")
        idle = [name for name, drafter in self.drafters.items() if drafter.kind == "none"]
        if idle:
            raise ValueError(f"the drafter {idle[0]!r} drafts nothing, so it has no acceptance length; leave it out")
        unknown = [name for name in (*self.against, *self.against.values()) if name not in self.drafters]
        if unknown or any(name == other for name, other in self.against.items()):
            raise ValueError(
                f"against names two different drafters each time, of {', '.join(self.drafters)}; got {self.against}"
            )
        if min(self.problems, self.batch_size, self.max_new_tokens, self.replicates) < 1 or self.margin < 0:
            raise ValueError(
                "problems, batch_size, max_new_tokens and replicates must be at least 1, and margin not negative"
            )

    def to_json(self) -> dict[str, JSON]:
        """The config as a JSON object."""
        return config_json(self)

    def reference(self, name: str) -> str | None:
        """The drafter that one is compared with; None for the first, where `against` does not name it."""
        other = self.against.get(name, next(iter(self.drafters)))
        return None if other == name else other


class Accepted(NamedTuple):
    """What a drafter reached, per problem; the prefill, which verifies nothing, is left out.

    Attributes:
        tokens: Tokens that verifications gave.
        steps: Verifications.
        drafted: Tokens that were drafted.
        accepted: Drafts that were kept.
    """

    tokens: Float[ndarray, " n"]
    steps: Float[ndarray, " n"]
    drafted: Float[ndarray, " n"]
    accepted: Float[ndarray, " n"]

    @property
    def length(self) -> float:
        """Acceptance length: tokens of one verification, over all problems."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def rate(self) -> float:
        """Share of the drafts that were kept."""
        return float(self.accepted.sum() / self.drafted.sum())


@dataclass(frozen=True, kw_only=True)
class DrafterRow:
    """A line of the table: a drafter at a temperature; the difference is to another drafter, over the same problems.

    Attributes:
        drafter: Its name in the recipe.
        temperature: Of the sampling.
        draft_tokens: K.
        length: Acceptance length.
        interval: Its 95% interval over problems.
        rate: Share of the drafts that were kept.
        verifications: How many there were.
        against: The drafter that it is compared with; None: none.
        difference: Acceptance length minus that of `against`.
        difference_interval: Its 95% interval.
    """

    drafter: str
    temperature: float
    draft_tokens: int
    length: float
    interval: Interval
    rate: float
    verifications: int
    against: str | None
    difference: float | None
    difference_interval: Interval | None

    def verdict(self, margin: float) -> str:
        """Whether the acceptance length drops against the other drafter's, by 95% intervals."""
        return "-" if self.difference_interval is None else verdict(self.difference_interval, margin)

    def to_json(self, margin: float) -> dict[str, JSON]:
        """The line as a JSON object."""
        span = self.difference_interval
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "draft_tokens": self.draft_tokens,
            "acceptance_length": self.length,
            "interval": list(self.interval),
            "acceptance_rate": self.rate,
            "verifications": self.verifications,
            "against": self.against,
            "difference": self.difference,
            "difference_interval": None if span is None else list(span),
            "verdict": self.verdict(margin),
        }


@dataclass(frozen=True, kw_only=True)
class PairsRow:
    """Mean difference of the pairs that a recipe names in `against`, at a temperature.

    Attributes:
        temperature: Of the sampling.
        differences: Of each pair.
        over_problems: 95% interval of their mean for these drafters and other problems (bootstrap, pairs kept).
        over_pairs: 95% interval of their mean for other pairs as well (Student's t on the differences).
    """

    temperature: float
    differences: tuple[float, ...]
    over_problems: Interval
    over_pairs: Interval

    @property
    def mean(self) -> float:
        """Of the differences."""
        return float(np.mean(self.differences))

    def to_json(self, margin: float) -> dict[str, JSON]:
        """The line as a JSON object."""
        return {
            "temperature": self.temperature,
            "differences": list(self.differences),
            "mean": self.mean,
            "interval_over_problems": list(self.over_problems),
            "interval_over_pairs": list(self.over_pairs),
            "verdict": verdict(self.over_pairs, margin),
        }


def verdict(difference: Interval, margin: float) -> str:
    """What an interval says of a difference of acceptance lengths."""
    if difference.high < 0:
        return "drops"
    return "does not drop" if difference.low > -margin else "not decided"


def pairs_row(temperature: float, pairs: Sequence[tuple[Accepted, Accepted]], bootstrap: Bootstrap) -> PairsRow:
    """Averages two or more pairs (a drafter, the one that it is compared with), all over the same problems."""
    assert len(pairs) > 1, "one pair has no spread"
    differences = np.array([a.length - b.length for a, b in pairs])
    replicates = np.mean([_differences(a, b, bootstrap) for a, b in pairs], axis=0)
    reach = student.ppf(0.975, len(pairs) - 1) * differences.std(ddof=1) / np.sqrt(len(pairs))
    middle = differences.mean()
    return PairsRow(
        temperature=temperature,
        differences=tuple(differences.tolist()),
        over_problems=percentile_interval(replicates),
        over_pairs=Interval(float(middle - reach), float(middle + reach)),
    )


def accepted_of(outputs: Sequence[Output]) -> Accepted:
    """The counts of finished requests.

    Raises:
        ValueError: No request went beyond its prefill.
    """
    counts = [(len(o.token_ids) - 1, o.stats.verify_steps - 1, o.stats.drafted, o.stats.accepted) for o in outputs]
    columns = np.array(counts, dtype=np.float64).reshape(-1, 4).T
    if not columns[1].sum():
        raise ValueError("no request was decoded beyond its first token; raise max_new_tokens")
    return Accepted(*columns)


def length_interval(accepted: Accepted, bootstrap: Bootstrap) -> Interval:
    """95% interval of the acceptance length over problems."""
    sums = bootstrap.sums(np.stack(accepted[:2], axis=1))
    return percentile_interval(sums[:, 0] / sums[:, 1])


def length_difference(a: Accepted, b: Accepted, bootstrap: Bootstrap) -> Interval:
    """95% interval of the acceptance length of `a` minus that of `b`, over the same problems."""
    return percentile_interval(_differences(a, b, bootstrap))


def _differences(a: Accepted, b: Accepted, bootstrap: Bootstrap) -> Float[ndarray, " R"]:
    sums = bootstrap.sums(np.stack((*a[:2], *b[:2]), axis=1))
    return np.asarray(sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3])


def study_drafters(config: DraftStudyConfig) -> None:
    """Decodes with every drafter and writes table and figures.

    Args:
        config: The study.

    Raises:
        ValueError: The data set has no such problems, or a drafter cannot be loaded.
        OSError: A file cannot be read or written.
    """
    target = load_target(config.target)
    requests = _requests(config)
    with writer_lock(config.output), ProvenanceRecorder({"dataset": config.dataset / "dataset.json"}) as provenance:
        results = {
            temperature: {
                name: _decode(config, target, drafter, requests, temperature, f"{name}, temperature {temperature}")
                for name, drafter in config.drafters.items()
            }
            for temperature in config.temperatures
        }
        rows = [row for temperature, by_name in results.items() for row in _rows(config, temperature, by_name)]
        means = _pairs(config, results)
        table = "\n".join((*_table(rows, config.margin), *_pairs_table(means, config.margin)))
        lines: list[JSON] = [row.to_json(config.margin) for row in rows]
        figures: dict[str, JSON] = {"problems": len(requests), "margin": config.margin, "rows": lines}
        if means:
            figures["pairs"] = [row.to_json(config.margin) for row in means]
        write_json(config.output / "acceptance.json", figures)
        write_text(config.output / "acceptance.md", f"{table}\n")
        write_text(config.output / "config.yaml", dump_config(config))
        provenance.write(config.output)
    print(table)


def _requests(config: DraftStudyConfig) -> list[Request]:
    records = [r for shard in shard_folders(config.dataset) for r in read_records(shard / "traces.parquet")]
    records = [record for record in records if record.split == config.split][: config.problems]
    if len(records) < config.problems:
        raise ValueError(
            f"the {config.split} split of {config.dataset} has {len(records)} problems, not {config.problems}; lower "
            "problems, or build a larger data set"
        )
    return [
        Request(
            key=record.problem,
            prompt_ids=tuple(record.prompt_ids),
            contract=Contract.from_spec(record.contract),
            max_new_tokens=config.max_new_tokens,
        )
        for record in records
    ]


def _decode(
    config: DraftStudyConfig,
    target: Target,
    drafter: DrafterConfig,
    requests: Sequence[Request],
    temperature: float,
    label: str,
) -> Accepted:
    sampling = Sampling(temperature=temperature)
    engine = HFEngine(
        target,
        sampling=sampling,
        drafter=load_drafter(drafter, target, sampling),
        num_draft_tokens=drafter.draft_tokens,
        batch_size=config.batch_size,
    )
    outputs: list[Output] = []
    with tqdm(total=len(requests), desc=label, disable=None) as bar:
        for batch in engine.stream_batches(requests):
            outputs += batch
            bar.update(len(batch))
    return accepted_of(outputs)


def _rows(config: DraftStudyConfig, temperature: float, results: Mapping[str, Accepted]) -> list[DrafterRow]:
    bootstrap = Bootstrap(replicates=config.replicates)
    rows = []
    for name, accepted in results.items():
        against = config.reference(name)
        other = None if against is None else results[against]
        row = DrafterRow(
            drafter=name,
            temperature=temperature,
            draft_tokens=config.drafters[name].draft_tokens,
            length=accepted.length,
            interval=length_interval(accepted, bootstrap),
            rate=accepted.rate,
            verifications=int(accepted.steps.sum()),
            against=against,
            difference=None if other is None else accepted.length - other.length,
            difference_interval=None if other is None else length_difference(accepted, other, bootstrap),
        )
        rows.append(row)
    return rows


def _pairs(config: DraftStudyConfig, results: Mapping[float, Mapping[str, Accepted]]) -> list[PairsRow]:
    if len(config.against) < 2:
        return []
    bootstrap = Bootstrap(replicates=config.replicates)
    return [
        pairs_row(temperature, [(by_name[a], by_name[b]) for a, b in config.against.items()], bootstrap)
        for temperature, by_name in results.items()
    ]


def _table(rows: Sequence[DrafterRow], margin: float) -> list[str]:
    lines = [
        "| drafter | temperature | K | tokens per verification (95%) | drafts kept "
        "| minus | difference (95%) | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        difference = "-"
        if row.difference is not None and row.difference_interval is not None:
            difference = f"{row.difference:+.3f} ({_span(row.difference_interval)})"
        lines.append(
            f"| {row.drafter} | {row.temperature:g} | {row.draft_tokens} | {row.length:.3f} ({_span(row.interval)}) | "
            f"{row.rate:.3f} | {row.against or '-'} | {difference} | {row.verdict(margin)} |"
        )
    return lines


def _pairs_table(rows: Sequence[PairsRow], margin: float) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "| pairs | temperature | mean difference | 95% over problems | 95% over pairs | verdict over pairs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        spans = f"{_span(row.over_problems)} | {_span(row.over_pairs)}"
        said = verdict(row.over_pairs, margin)
        lines.append(f"| {len(row.differences)} | {row.temperature:g} | {row.mean:+.3f} | {spans} | {said} |")
    return lines


def _span(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"

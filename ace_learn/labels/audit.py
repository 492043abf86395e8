"""What probing cost, and what the strategy got wrong, measured on the traces that were probed at every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import binomtest

from ace_learn.artifacts import JSON
from ace_learn.labels.records import TraceRecord
from ace_learn.labels.strategy import ProbingConfig, rehearse
from ace_learn.labels.targets import Minimal, minimal_boundary

_CONFIDENCE = 0.95


class ProbeCount(NamedTuple):
    """Boundaries asked, of those that `all` would ask. Natural ends count in neither: they cost nothing."""

    traces: int
    boundaries: int
    asked: int

    @property
    def share(self) -> float:
        """What was asked, of what `all` asks."""
        return self.asked / max(1, self.boundaries)

    def to_json(self) -> dict[str, JSON]:
        """For summary.json."""
        return {**self._asdict(), "share": self.share}


class Disagreement(NamedTuple):
    """The strategy's labels against the probes of the audited traces."""

    traces: int
    asked: int
    """Boundaries that the strategy would have asked there."""
    boundaries: int
    inferred: int
    """Labels that it would have inferred."""
    wrong: int
    """Those among them that the probe contradicts."""
    moved: int
    """Traces whose b* is another."""
    shift_tokens: int
    """Sum over the traces of the strategy's b* minus the true one, in tokens of thinking."""

    def to_json(self) -> dict[str, JSON]:
        """For summary.json; the interval is Clopper and Pearson's, over labels, as if those of a trace were apart."""
        low, high = self.interval
        return {
            **self._asdict(),
            "wrong_share": self.wrong / max(1, self.inferred),
            "wrong_interval": [low, high],
            "moved_share": self.moved / max(1, self.traces),
            "shift_tokens_mean": self.shift_tokens / max(1, self.traces),
        }

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the share of inferred labels that are wrong."""
        if self.inferred == 0:
            return 0.0, 1.0
        bounds = binomtest(self.wrong, self.inferred).proportion_ci(_CONFIDENCE, method="exact")
        return float(bounds.low), float(bounds.high)


def count_probes(records: Sequence[TraceRecord]) -> ProbeCount:
    """Counts the boundaries of usable traces that were asked."""
    pairs = [
        asked
        for record in records
        for asked, free in zip(record.probe_asked, record.ends_naturally, strict=True)
        if not free
    ]
    return ProbeCount(len(records), len(pairs), sum(pairs))


def measure(records: Sequence[TraceRecord], probing: ProbingConfig, minimal: Minimal) -> Disagreement:
    """Rehearses the strategy on traces that were probed at every boundary."""
    counts = Disagreement(len(records), 0, 0, 0, 0, 0, 0)
    for record in records:
        matches = [match is True for match in record.probe_matches]
        natural = record.ends_naturally
        free = natural if record.full_answer is not None else [True] * len(matches)
        asked, labels = rehearse(probing.strategy, matches, free=free)
        inferred = [
            (label, match)
            for label, match, known, given in zip(labels, matches, asked, free, strict=True)
            if not known and not given and label is not None
        ]
        shift = _thinking(record, labels, minimal) - _thinking(record, matches, minimal)
        counts = Disagreement(
            traces=counts.traces,
            asked=counts.asked + sum(asked),
            boundaries=counts.boundaries + natural.count(False),
            inferred=counts.inferred + len(inferred),
            wrong=counts.wrong + sum(label != match for label, match in inferred),
            moved=counts.moved + (shift != 0),
            shift_tokens=counts.shift_tokens + shift,
        )
    return counts


def _thinking(record: TraceRecord, matches: Sequence[bool | None], minimal: Minimal) -> int:
    """Tokens thought up to b*."""
    best = minimal_boundary(matches)
    index = best.first if minimal == "first" else best.stable
    return record.boundary[index] + 1 if index < len(record.boundary) else record.think_end - record.think_start


def probing_report(records: Sequence[TraceRecord], probing: ProbingConfig, minimal: Minimal) -> dict[str, JSON]:
    """Cost of probing the train split, and the audit of the strategy, for summary.json.

    Args:
        records: Usable traces of all splits.
        probing: How the train split was probed.
        minimal: Which boundary is b*.
    """
    train = [record for record in records if record.split == "train"]
    audited = [record for record in train if probing.audits(record.problem)]
    outside = [record for record in train if not probing.audits(record.problem)]
    return {
        "strategy": probing.strategy,
        "samples": probing.samples,
        "train": count_probes(train).to_json(),
        "outside_audit": count_probes(outside).to_json(),
        "audit": measure(audited, probing, minimal).to_json() if audited else None,
    }


def probing_text(records: Sequence[TraceRecord], probing: ProbingConfig, minimal: Minimal) -> list[str]:
    """The report in lines, none for a strategy that asks everything once."""
    if probing == ProbingConfig():
        return []
    train = [record for record in records if record.split == "train"]
    audited = [record for record in train if probing.audits(record.problem)]
    whole, outside = count_probes(train), count_probes([r for r in train if not probing.audits(r.problem)])
    lines = [
        f"{probing.strategy} probed {outside.asked:,} of {outside.boundaries:,} boundaries ({outside.share:.1%}) of "
        f"{outside.traces:,} train traces outside the audit, {whole.asked:,} of {whole.boundaries:,} "
        f"({whole.share:.1%}) with it; {probing.samples} probe{'s' * (probing.samples > 1)} each"
    ]
    if audited:
        found = measure(audited, probing, minimal)
        lines.append(
            f"audit of {found.traces:,} traces: {_wrong_text(found)}; b* differs in {found.moved:,} of them "
            f"({found.moved / found.traces:.1%}), by {found.shift_tokens / found.traces:+.1f} tokens on average"
        )
    return lines


def _wrong_text(found: Disagreement) -> str:
    if found.inferred == 0:
        return "no label is inferred"
    low, high = found.interval
    return (
        f"{found.wrong:,} of {found.inferred:,} inferred labels are wrong ({found.wrong / found.inferred:.1%}, 95% "
        f"interval {low:.1%} to {high:.1%})"
    )

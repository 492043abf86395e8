"""What a build yielded, in numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ace_learn.artifacts import JSON, read_fields, write_json
from ace_learn.features import shard_folders
from ace_learn.labels.audit import probing_report, probing_text
from ace_learn.labels.records import TraceRecord, read_records
from ace_learn.labels.strategy import ProbingConfig
from ace_learn.labels.targets import Minimal

_BINS = 10


def write_summary(dataset: Path, *, probing: ProbingConfig, minimal: Minimal) -> dict[str, JSON]:
    """Writes `summary.json` and `summary.png` of a data set whose shards are all there, and prints the numbers.

    Args:
        dataset: The data set folder.
        probing: How its train split was probed.
        minimal: Which boundary is b*.
    """
    shards = shard_folders(dataset)
    counts = [read_fields(shard / "shard.json") for shard in shards]
    totals = {
        name: sum(count.integer(name) for count in counts)
        for name in ("trace_tokens", "probe_tokens", "naive_probe_tokens")
    }
    records = [record for shard in shards for record in read_records(shard / "traces.parquet")]
    usable = [record for record in records if not record.excluded]
    curve = match_curve(usable)
    families = sorted({record.family for record in records})
    summary: dict[str, JSON] = {
        "problems": len(records),
        "excluded": len(records) - len(usable),
        **totals,
        "probe_share": totals["probe_tokens"] / max(1, totals["trace_tokens"]),
        "match_curve": [None if np.isnan(value) else float(value) for value in curve],
        "probing": probing_report(usable, probing, minimal),
        "families": {family: _family([r for r in usable if r.family == family]) for family in families},
    }
    write_json(dataset / "summary.json", summary)
    _plot(dataset / "summary.png", usable, curve)
    print("\n".join([_text(summary, usable), *probing_text(usable, probing, minimal)]))
    return summary


def match_curve(records: Sequence[TraceRecord]) -> Float[ndarray, " bins"]:
    """Share of boundaries whose answer matches the full one, by relative position in the thinking (NaN: none there).

    Traces that were probed in part are left out: where a strategy asks depends on the answers.
    """
    whole = [r for r in records if all(r.probe_asked)]
    place = np.array([(b + 1) / (r.think_end - r.think_start) for r in whole for b in r.boundary])
    match = np.array([m for r in whole for m in r.probe_matches], dtype=float)
    which = np.minimum((place * _BINS).astype(int), _BINS - 1)
    hits = np.bincount(which, weights=match, minlength=_BINS)
    seen = np.bincount(which, minlength=_BINS)
    return np.where(seen > 0, hits / np.maximum(seen, 1), np.nan)


def _family(records: Sequence[TraceRecord]) -> dict[str, JSON]:
    count = max(1, len(records))
    think = sum(record.think_end - record.think_start for record in records)
    return {
        "traces": len(records),
        "accuracy": sum(record.full_correct for record in records) / count,
        "no_think_accuracy": sum(record.no_think_correct for record in records) / count,
        "boundaries_mean": sum(len(record.boundary) for record in records) / count,
        "think_tokens_mean": think / count,
        "minimal_share": sum(record.minimal_tokens for record in records) / max(1, think),
    }


def _text(summary: dict[str, JSON], usable: Sequence[TraceRecord]) -> str:
    lines = [
        f"{summary['problems']} problems, {summary['excluded']} excluded, "
        f"{sum(len(r.boundary) for r in usable)} boundaries",
        f"tokens run: {summary['trace_tokens']:,} for traces, {summary['probe_tokens']:,} for probes "
        f"(each probe from scratch would have cost {summary['naive_probe_tokens']:,})",
    ]
    for family in sorted({record.family for record in usable}):
        numbers = _family([record for record in usable if record.family == family])
        shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items() if isinstance(value, int | float))
        lines.append(f"{family}: {shown}")
    return "\n".join(lines)


def _plot(path: Path, records: Sequence[TraceRecord], curve: Float[ndarray, " bins"]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot((np.arange(_BINS) + 0.5) / _BINS, curve, marker="o")
    left.set(xlabel="relative position of the exit in the thinking", ylabel="answers that match the full trace's")
    left.set(xlim=(0, 1), ylim=(0, 1.02))
    share = [record.minimal_tokens / max(1, record.think_end - record.think_start) for record in records]
    right.hist(share, bins=20, range=(0, 1))
    right.set(xlabel="minimal reasoning / full thinking (tokens)", ylabel="traces", xlim=(0, 1))
    figure.savefig(path, dpi=130)

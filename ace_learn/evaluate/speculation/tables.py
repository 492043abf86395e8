"""The tables of the study of acceptance features, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from ace_learn.artifacts import JSON, JsonFields


def feature_table(results: Mapping[str, JSON]) -> str:
    """Every predictor, over all positions and at each."""
    fields = JsonFields.of(dict(results), where="results").fields("features")
    rows = ["| predictor | lossless | AUC | log-loss | ECE | AUC by position |", "|---|---|---|---|---|---|"]
    for name in fields.data:
        row = fields.fields(name)
        auc = [_number(entry, "auc", ".2f") for entry in row.items("by_position")]
        rows.append(
            f"| {name} | {'yes' if row.boolean('lossless') else 'no'} | {row.number('auc'):.4f} "
            f"| {row.number('log_loss'):.4f} | {row.number('ece'):.4f} | {' '.join(auc)} |"
        )
    return "\n".join(rows)


def workload_table(results: Mapping[str, JSON]) -> str:
    """Slope and first intercept of each workload and of its parts."""
    fields = JsonFields.of(dict(results), where="results").fields("workloads")
    parts = ("all", "early", "late", "thinking", "answer")
    rows = [
        "| workload | acceptance | " + " | ".join(f"{part}: slope, first intercept" for part in parts) + " |",
        "|---|---|" + "---|" * len(parts),
    ]
    for name in fields.data:
        row = fields.fields(name)
        shown = []
        for part in parts:
            entry = row.get(part)
            if not isinstance(entry, dict):
                shown.append("too few")
                continue
            one = JsonFields.of(entry, where=name)
            shown.append(f"{one.number('slope'):.2f}, {_first(one):.2f}")
        rows.append(f"| {name} | {_number(row.get('all'), 'acceptance', '.3f')} | {' | '.join(shown)} |")
    return "\n".join(rows)


def stream_table(results: Mapping[str, JSON]) -> str:
    """The online estimator: quality, recovery after a switch, and forced rows."""
    streams = JsonFields.of(dict(results), where="results").fields("streams")
    rows = ["| events | predictor | AUC | log-loss | ECE | unfitted ECE / this ECE |", "|---|---|---|---|---|---|"]
    for name in ("as drafted", "distorted"):
        unfitted = streams.fields(name).fields("max, unfitted").number("ece")
        for predictor in streams.fields(name).data:
            row = streams.fields(name).fields(predictor)
            figures = [f"{row.number(key):.4f}" for key in ("auc", "log_loss", "ece")]
            rows.append(f"| {name} | {predictor} | {' | '.join(figures)} | {unfitted / row.number('ece'):.1f} |")
    switch = streams.fields("switch")
    rows += ["", "| forgetting factor | ECE before the switch, then in windows of 640 steps |", "|---|---|"]
    for name in switch.data:
        eces = [f"{value:.3f}" for value in switch.items(name) if isinstance(value, float)]
        rows.append(f"| {name} | {' '.join(eces)} |")
    poisoned = streams.fields("poisoned")
    rows += ["", "| stream | slope | first intercept | ECE on freely judged drafts |", "|---|---|---|---|"]
    for name in poisoned.data:
        row = poisoned.fields(name)
        rows.append(f"| {name} | {row.number('slope'):.3f} | {_first(row):.3f} | {row.number('ece'):.4f} |")
    return "\n".join(rows)


def _first(row: JsonFields) -> float:
    value = row.items("intercepts")[0]
    assert isinstance(value, float)
    return value


def _number(entry: JSON, key: str, form: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    return f"{value:{form}}" if isinstance(value, float) else "n/a"

"""Prometheus metrics of exits and contracts; in the default registry, so they stand on vLLM's own `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from ace_learn.artifacts import JsonFields
from ace_learn.contracts import JSON

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_COUNTS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class Metrics:
    """What the records of finished requests add up to.

    Under several API servers vLLM names a folder (PROMETHEUS_MULTIPROC_DIR) through which prometheus_client adds up all
    processes by itself.
    """

    def __init__(self) -> None:
        """Registers the metrics, once per process: see `metrics`."""
        self.exits = Counter("ace_learn_exits", "Requests by why their thinking ended", ["reason"])
        self.commits = Counter("ace_learn_contract_commits", "Requests that ended where their contract was met")
        self.invalid = Counter("ace_learn_contract_missed", "Requests that ended without an answer to their contract")
        self.saved = Counter(
            "ace_learn_tokens_saved",
            "Think tokens that exits saved: up to the request's thinking budget, or to the mean of those that ran on",
        )
        self.surplus = Counter("ace_learn_surplus_tokens", "Tokens delivered behind a commit")
        self.failures = Counter("ace_learn_hook_failures", "Requests that the exit hook gave up")
        self.hook_off = Gauge(
            "ace_learn_hook_off",
            "1 once the exit hook is off for good, after too many failures",
            multiprocess_mode="max",
        )
        self.log_errors = Counter("ace_learn_audit_log_errors", "Audit records that could not be written")
        self.signals = Histogram(
            "ace_learn_exit_signal", "Smoothed signals at exits", ["signal"], buckets=(*_SHARES, *_COUNTS)
        )
        self.thought = Histogram(
            "ace_learn_tokens_thought", "Think tokens per request", ["reason"], buckets=(0, 1, *_COUNTS)
        )
        self._natural_tokens = self._natural = 0

    def observe(self, record: Mapping[str, JSON]) -> None:
        """Counts one finished request."""
        fields = JsonFields(data=dict(record), where="audit record")
        reason, thought = fields.text("reason"), fields.integer("tokens_thought")
        self.exits.labels(reason).inc()
        self.thought.labels(reason).observe(thought)
        self.failures.inc(len(fields.items("hook_failures")))
        self.surplus.inc(fields.integer("surplus"))
        if fields.get("hook_off"):
            self.hook_off.set(1)
        if fields.get("finish_reason") == "contract":
            self.commits.inc()
        if fields.get("contract_valid") is False:
            self.invalid.inc()
        if reason == "policy":
            self.saved.inc(self._saved(thought, fields.get("budget")))
            for name, value in fields.fields("signals").data.items():
                assert isinstance(value, int | float)
                self.signals.labels(name).observe(value)
        elif reason in ("natural", "shadow"):
            self._natural_tokens += fields.integer("think_tokens")
            self._natural += 1

    def _saved(self, thought: int, budget: JSON) -> float:
        if isinstance(budget, int):
            return max(0, budget - thought)
        return max(0.0, self._natural_tokens / self._natural - thought) if self._natural else 0.0


@cache
def metrics() -> Metrics:
    """The metrics of this process."""
    return Metrics()

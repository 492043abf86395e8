"""What records add up to on /metrics, in one process and over several."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client")

from ace_learn.engines.vllm.metrics import metrics


def record(finish_reason="contract", **fields):
    known = {
        "finish_reason": finish_reason, "cut": 0, "reason": "natural", "tokens_thought": 5, "think_tokens": 5,
        "surplus": 0, "hook_failures": [], "hook_off": False, "budget": None, "signals": None, "contract_valid": None,
    }  # fmt: skip
    return known | fields


def test_metrics_add_up():
    from prometheus_client import REGISTRY, generate_latest

    counted = metrics()
    counted._natural = counted._natural_tokens = 0

    def value(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    names = [
        "ace_learn_tokens_saved_total", "ace_learn_contract_commits_total", "ace_learn_contract_missed_total",
        "ace_learn_hook_failures_total",
    ]  # fmt: skip
    before = {name: value(name) for name in names}
    count = value("ace_learn_exits_total", reason="policy")
    signals = value("ace_learn_exit_signal_count", signal="consistency")
    exit_at = {"reason": "policy", "signals": {"consistency": 0.97}}
    counted.observe(record(**exit_at, tokens_thought=10))  # no budget, no mean yet: nothing is known to be saved
    counted.observe(record("stop", tokens_thought=40, think_tokens=100, contract_valid=False, reason="shadow"))
    counted.observe(record("length", think_tokens=60, hook_failures=["a", "b"]))
    counted.observe(record(**exit_at, tokens_thought=30))  # 80 - 30
    counted.observe(record(**exit_at, tokens_thought=30, budget=50))  # 50 - 30
    counted.observe(record(**exit_at, tokens_thought=99))  # more than the mean: nothing
    assert {name: value(name) - before[name] for name in names} == dict(zip(names, (70, 4, 1, 2), strict=True))
    assert value("ace_learn_exits_total", reason="policy") - count == 4
    assert value("ace_learn_exit_signal_count", signal="consistency") - signals == 4
    assert value("ace_learn_hook_off") == 0
    assert b"ace_learn_tokens_thought_bucket" in generate_latest()


SERVER = """
import sys
from ace_learn.engines.vllm.metrics import metrics
fields = {"finish_reason": "contract", "reason": "natural", "tokens_thought": 5, "think_tokens": 5, "surplus": 0,
          "hook_failures": [], "hook_off": sys.argv[1] == "off", "budget": None, "contract_valid": True}
metrics().observe(fields)
"""
PAGE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


@pytest.mark.slow
def test_several_servers_add_up(tmp_path):
    """As vLLM does it with --api-server-count: a folder in the environment, which every process writes to."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for argument in ("on", "off"):
        subprocess.run([sys.executable, "-c", SERVER, argument], env=environment, check=True, timeout=120)
    command = [sys.executable, "-c", PAGE]
    page = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "ace_learn_contract_commits_total 2.0" in page
    assert 'ace_learn_exits_total{reason="natural"} 2.0' in page
    assert "ace_learn_hook_off 1.0" in page

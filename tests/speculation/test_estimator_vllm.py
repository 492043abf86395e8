"""Parity with the estimator of vLLM, the foreign implementation of the same formulas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_it_is_the_estimator_of_vllm():
    pytest.importorskip("vllm")
    script = Path(__file__).with_name("vllm_estimator.py")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen["slope"]) == 5
    assert seen["features"] < 1e-3  # theirs subtracts the mode from the sum, and loses digits where it dominates
    assert seen["predictions"] < 1e-5
    for theirs, ours in seen["slope"]:
        assert ours == pytest.approx(theirs, abs=1e-5)
    for theirs, ours in seen["intercepts"]:
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(seen["slope"][-1][0] - 0.5) > 0.05  # they have moved

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
    assert set(seen) == {"synthetic", "real"}
    # Real drafts often have a mode so dominant that theirs has no digit left, and takes them for certain.
    for name, tolerance in (("synthetic", 1e-5), ("real", 5e-4)):
        stream = seen[name]
        assert len(stream["slope"]) >= 5
        assert stream["features"] < 1e-3
        assert stream["predictions"] < tolerance
        for theirs, ours in stream["slope"] + stream["intercepts"]:
            assert ours == pytest.approx(theirs, abs=tolerance)
        assert abs(stream["slope"][-1][0] - 0.5) > 0.05  # they have moved

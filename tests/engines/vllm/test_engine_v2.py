"""Engines on Model Runner V2, each in a process of its own: its Triton kernels run in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ace_learn.engines.loading import load_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.testing.vllm.cells import Cell, CellRequest, run_interpreted
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import tiny_prompts, write_tiny_models
from ace_learn.testing.vllm.speculation import speculation_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, TOKENS = 6, 40
ON = {"ace_enabled": True}
SHADOW = {**ON, "ace_shadow": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_models(tmp_path_factory.mktemp("models") / "tiny")


def cell(models, settings, *, drafting="draft_model", temperature=0.0, keys=ON):
    requests = tuple(
        CellRequest(prompt_ids=tuple(prompt), max_tokens=TOKENS, extra_args=keys, temperature=temperature)
        for prompt in tiny_prompts(REQUESTS)
    )
    return Cell(
        name=drafting,
        model=str(models.target),
        settings=settings,
        speculation=speculation_of(drafting, models),
        requests=requests,
    )


def write_head(models, folder):
    """Writes a head for the target; returns the requests it was made with."""
    target = load_target(TargetConfig(model=str(models.target), dtype="float32", device="cpu"))
    asked = [Request(key=i, prompt_ids=tuple(p), max_new_tokens=TOKENS) for i, p in enumerate(tiny_prompts(REQUESTS))]
    write_test_head(folder, target, asked)
    return asked


def test_exits_are_those_of_the_hf_engine_and_shadows_change_nothing(models, tmp_path):
    asked = write_head(models, tmp_path)
    engine = load_engine(str(models.target), head=tmp_path, sampling=Sampling(temperature=0.0))
    expected = [list(output.token_ids) for output in engine.generate(asked)]
    settings = {"head": str(tmp_path)}
    drafted, stock, shadowed = run_interpreted([cell(models, settings, keys=keys) for keys in (ON, None, SHADOW)])
    assert drafted.token_ids == expected
    assert drafted.watched.tokens_per_step > 1.2
    assert drafted.watched.exits >= 2
    assert shadowed.token_ids == stock.token_ids
    assert sum(a != b for a, b in zip(stock.token_ids, expected, strict=True)) == drafted.watched.exits
    assert [audit["reason"] for audit in shadowed.audits].count("shadow") >= 2


def test_cactus_accepts_more_and_says_what_it_spent(models, tmp_path):
    write_head(models, tmp_path)
    settings = {"head": str(tmp_path)}
    lossy = settings | {"acceptance": {"rule": "cactus_exact", "delta": 0.5, "only_in_think": True}}
    standard, cactus, greedy = run_interpreted(
        [
            cell(models, settings, keys=SHADOW, temperature=1.0),
            cell(models, lossy, keys=SHADOW, temperature=1.0),
            cell(models, lossy, keys=SHADOW),
        ]
    )
    assert cactus.watched.tokens_per_step > 1.2 * standard.watched.tokens_per_step
    most = 0.5 * (TOKENS + 4)  # the last window may reach beyond the cap
    assert all(0.2 * most < audit["kl"] <= most for audit in cactus.audits)
    assert all(audit["kl"] == 0 for audit in [*standard.audits, *greedy.audits])  # inert at temperature 0


def run_script(name, *arguments):
    script = Path(__file__).with_name(name)
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, script, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_forced_rows_are_no_labels_of_vllms_estimator():
    found = run_script("estimator_labels.py")
    for ours, clean in zip(found["ours"], found["clean"], strict=True):
        assert_close(ours, clean)
    assert found["stock"][2] != found["clean"][2]


def test_rows_forced_by_vllms_thinking_budget_are_no_labels_either(models, tmp_path):
    write_head(models, tmp_path)
    found = run_script("budget_labels.py", models.target, models.draft, tmp_path)
    assert {"budget", "policy"} <= set(found["reasons"])
    (accepted, rejected), given = found["sampled"], found["given"]
    assert rejected >= 3
    assert given[1] == 0
    assert 0.8 * accepted < given[0] <= accepted


def assert_close(found, expected):
    if isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == pytest.approx(expected, abs=1e-4)

import json
import re

import pytest
import torch

from ace_learn.engines.vllm.benchmark import HookBenchmark, HookCost, benchmark_hook


@pytest.mark.parametrize(
    "wrong", [{"batch_sizes": ()}, {"draft_tokens": ()}, {"draft_tokens": (-1,)}, {"batch_sizes": (0,)}, {"steps": 0}]
)
def test_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match="sizes >= 1 and draft_tokens >= 0"):
        HookBenchmark(**wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named():
    with pytest.raises(ValueError, match="no CUDA device"):
        HookBenchmark(device="cuda")


def test_share_of_the_models_step():
    assert HookCost(16, 4, 250.0, 50_000.0).share == 0.005


@pytest.mark.slow
def test_figures_are_printed_and_written(tmp_path, capsys):
    config = HookBenchmark(
        batch_sizes=(1, 2), draft_tokens=(0, 1), context=8, steps=2, model_steps=1, output=tmp_path / "costs"
    )
    costs = benchmark_hook(config)
    assert [cost[:2] for cost in costs] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(0 < cost.hook_us < cost.model_us for cost in costs)
    written = json.loads((tmp_path / "costs/costs.json").read_text())
    assert written["model_parameters"] == pytest.approx(134.5e6, rel=0.01)
    assert [row["hook_us"] for row in written["costs"]] == [cost.hook_us for cost in costs]
    assert (tmp_path / "costs/provenance.json").is_file()
    assert re.search(r"^ +2 +1 +\d+ +\d+ +\d+\.\d\d%$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(ValueError, match="exists already"):
        benchmark_hook(config)

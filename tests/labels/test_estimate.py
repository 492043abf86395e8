"""The estimate's terms against the real thing in small, and the two recipes against 80 GB."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from ace_learn.cli.common import build_parser, parse_config
from ace_learn.cli.estimate import main
from ace_learn.features import INDEX_COLUMNS, FeatureSpec, write_features
from ace_learn.labels.build import BuildConfig
from ace_learn.labels.estimate import (
    EstimateConfig,
    estimate_lines,
    feature_bytes,
    memory_of,
    model_size,
    phases_of,
)
from ace_learn.labels.strategy import ProbingConfig
from ace_learn.models.cache import grown_capacity
from ace_learn.models.target import Target, TargetConfig
from ace_learn.thinking import ThinkMarkers
from tests.helpers.models import QWEN3_4B_THINKING, R1_DISTILL_LLAMA_8B, shrunk_config
from tests.helpers.targets import WORDS, tiny_tokenizer

ROOT = Path(__file__).parents[2]
MODELS = {"qwen3-4b-thinking": QWEN3_4B_THINKING, "deepseek-r1-distill-llama-8b": R1_DISTILL_LLAMA_8B}


@pytest.fixture(scope="module", params=MODELS)
def small(request):
    config = shrunk_config(MODELS[request.param], len(WORDS), WORDS.index("<eos>"))
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_config(config).float()
    return Target(model, tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name="small"), model_size(config, "float32")


def run(target, cache, start, stop, longest):
    rows = cache.num_slots
    positions = torch.arange(start, stop).expand(rows, -1)
    target.forward(torch.ones(rows, stop - start, dtype=torch.long), positions, cache, longest=longest)


def test_parameters_are_the_model_s(small):
    target, size = small
    assert size.parameters == sum(p.numel() for p in target.model.parameters())
    assert size.hidden == target.identity.hidden_size


def test_published_parameter_counts():
    counts = [model_size(AutoConfig.for_model(**real)).parameters for real in MODELS.values()]
    assert counts == [4_022_468_096, 8_030_261_248]
    assert model_size(AutoConfig.for_model(**QWEN3_4B_THINKING)).dtype == torch.bfloat16


@pytest.mark.parametrize(("prompt", "last"), [(5, 40), (100, 100), (30, 400)])
def test_cache_bytes_are_those_of_a_real_cache(small, prompt, last):
    target, size = small
    cache = target.new_cache(3)
    run(target, cache, 0, prompt, prompt)
    for end in range(prompt + 1, last + 1):
        run(target, cache, end - 1, end, end)

    def allocated(of):
        return sum(part.nbytes for layer in of.slot_layers for part in (layer.keys, layer.values))

    assert allocated(cache) == 3 * grown_capacity(prompt, last) * size.kv_bytes
    assert allocated(cache.fork(torch.tensor([0, 2]), last, room=7)) == 2 * (last + 7) * size.kv_bytes


@pytest.mark.parametrize(("tokens", "cached"), [(48, 0), (1, 200)])
def test_flops_are_those_that_torch_counts(small, tokens, cached):
    target, size = small
    cache = target.new_cache(4)
    if cached:
        run(target, cache, 0, cached, cached)
    context = cached + tokens
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(target, cache, cached, context, context)
    assert counter.get_total_flops() == pytest.approx(size.flops(4 * tokens, context=context), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feature_bytes_are_those_of_the_file(tmp_path, dtype):
    spec = FeatureSpec(sources=("target_last", "target_aux", "scalars"), hidden_size=24, aux_layers=(0, 1, 2))
    rows = {
        "target_last": torch.zeros(57, 24, dtype=dtype),
        "target_aux": torch.zeros(57, 72, dtype=dtype),
        "scalars": torch.zeros(57, spec.width("scalars")),
        "targets": torch.zeros(57, 4),
        **{name: torch.zeros(57, dtype=torch.long) for name in INDEX_COLUMNS},
    }
    write_features(tmp_path, rows)
    data = (tmp_path / "features.safetensors").read_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == feature_bytes(spec, 57, dtype)


def config_of(**changes):
    values = {
        "target": TargetConfig(model="m"), "output": Path("o"), "splits": {"train": 60, "test": 40}, "batch_size": 10,
        "shard_size": 50, "prompt_tokens": 100, "trace_tokens": 400, "boundaries": 15, "answer_tokens": 20,
        "max_answer_tokens": 30, "max_new_tokens": 1000, "longest_trace": 2.0, "step_overhead_ms": 0.0,
    }  # fmt: skip
    return EstimateConfig(**values | changes)


def test_phases_by_hand():
    size = model_size(AutoConfig.for_model(**QWEN3_4B_THINKING))
    prefill, traces, probes, no_think = phases_of(config_of(), size)
    assert (prefill.tokens, prefill.steps) == (100 * 100, 10)
    assert (traces.tokens, traces.steps) == (100 * 420, 10 * 830)
    assert probes.tokens == 100 * 15 * 21
    assert no_think.tokens == 100 * 120
    body = 36 * (2560 * 4096 * 2 + 2560 * 1024 * 2 + 3 * 2560 * 9728)
    assert (size.body, size.head) == (body, 2560 * 151936)
    assert traces.flops == pytest.approx(42000 * (2 * (body + size.head) + 4 * 36 * 4096 * (100 + 830 / 2)))
    read = 8300 * size.weight_bytes + 42000 * (100 + 830 / 2) * 147456
    assert traces.bytes == pytest.approx(read)
    assert traces.seconds == pytest.approx(read / (2.04e12 * 0.6))  # the memory is slower than the arithmetic
    slow = phases_of(config_of(step_overhead_ms=10.0, peak_tflops=1.0), size)[1]
    assert slow.seconds == pytest.approx(traces.flops / 0.4e12 + 83)


def test_probes_by_hand():
    size = model_size(AutoConfig.for_model(**QWEN3_4B_THINKING))

    def probes(**probing):
        return phases_of(config_of(probing=ProbingConfig(**probing)), size)[2].tokens / 21

    assert probes(strategy="bisect") == 40 * 15 + 60 * 4
    assert probes(strategy="bisect", audit=0.5) == 40 * 15 + 30 * 15 + 30 * 4
    assert probes(strategy="first", samples=3) == 40 * 15 + 60 * 8 * 3
    assert probes(samples=2) == 40 * 15 + 60 * 15 * 2


def read_recipe(name, *flags):
    parser = build_parser(EstimateConfig, description="")
    return parse_config(parser, EstimateConfig, [str(ROOT / "data_builders" / f"{name}.yaml"), *flags])


@pytest.mark.parametrize("name", MODELS)
def test_the_recipes_fit_80_gb_and_the_docs_show_what_the_command_prints(name):
    config, size = read_recipe(name), model_size(AutoConfig.for_model(**MODELS[name]), "bfloat16")
    assert memory_of(config, size).device < 0.9 * 80e9
    shown = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for line in estimate_lines(config, size):
        assert line in shown, f"run `python -m ace_learn.estimate data_builders/{name}.yaml` and update docs/models.md"


@pytest.mark.parametrize("name", MODELS)
def test_recipe_and_head_are_a_pair(name):
    data, head = (yaml.safe_load((ROOT / f / f"{name}.yaml").read_text()) for f in ("data_builders", "training"))
    assert head["dataset"] == data["output"]
    assert head["sources"] == data["features"]["sources"]
    assert head["rows"] == data["features"]["rows"]


def test_the_command_reads_a_config_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B_THINKING))
    recipe = str(ROOT / "data_builders" / "qwen3-4b-thinking.yaml")
    for model in (tmp_path, tmp_path / "config.json"):
        main([recipe, "--model", str(model), "--hardware", "h200"])
        out = capsys.readouterr().out
        assert "4.02e9 parameters in bfloat16" in out
        assert "memory of one h200 (141 GB)" in out
    main([recipe, "--model", str(tmp_path), "--batch_size", "64"])
    assert "too much: lower batch_size" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([recipe, "--model", str(tmp_path / "nothing")])
    assert "--model" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([recipe, "--model", str(tmp_path), "--mfu", "3"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--memory_gb", "0"), "memory_gb must be positive, not 0"),
        (("--peak_tflops", "-3"), "peak_tflops must be positive"),
        (("--bandwidth_tb_s", "0"), "bandwidth_tb_s must be positive"),
        (("--target.dtype", "nn"), "unknown dtype 'nn'; known: auto, float32"),
        (("--batch_size", f"1{'0' * 400}"), "a number is too large"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(tmp_path, capsys, flags, named):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B_THINKING))
    with pytest.raises(SystemExit, match="2"):
        main([str(ROOT / "data_builders" / "qwen3-4b-thinking.yaml"), "--model", str(tmp_path), *flags])
    assert named in capsys.readouterr().err


def test_estimate_reads_every_field_of_a_build_recipe():
    assert {f.name for f in fields(BuildConfig)} < {f.name for f in fields(EstimateConfig)}

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ace_learn.engines.vllm.configuration import tapped_layers
from ace_learn.engines.vllm.plugin import configure, register
from ace_learn.engines.vllm.settings import Settings
from ace_learn.features import FeatureSpec
from ace_learn.heads.export import HeadCard, save_head
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.models.draft_files import weights_sha256
from ace_learn.models.target import EMBEDDED, TargetConfig, load_target
from ace_learn.reasoner import drafter_path, weights_path
from ace_learn.speculation.drafters import DraftStates

V1, V2 = "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"
CACTUS = {"rule": "cactus_exact", "delta": 0.1}


@pytest.fixture(scope="module")
def identity():
    return load_target(TargetConfig(model=EMBEDDED, device="cpu")).identity


@pytest.fixture
def write_head(tmp_path, identity):
    def write(sources=("target_last", "scalars"), aux_layers=(1, 2, 3), of=identity, draft=None, **policy):
        spec = FeatureSpec(sources=sources, hidden_size=of.hidden_size, aux_layers=aux_layers, draft=draft)
        head = SignalHead(HeadConfig(arch="linear"), spec.size)
        card = HeadCard(
            config=head.config, spec=spec, identity=of, data_sha256="0" * 64, rows="boundaries", metrics=None
        )
        save_head(tmp_path, head, card)
        rule = {"predicate": "all", "thresholds": {"consistency": 0.5}, "score": None, "ewma": 1.0} | policy
        rule |= {"smooth_over": "boundaries", "patience": 1, "min_thinking_tokens": 0, "certificate": None}
        (tmp_path / "policy.json").write_text(json.dumps(rule | {"sha256": None}))
        return str(tmp_path)

    return write


def model_config(**changes):
    text = json.loads((weights_path() / "config.json").read_text())
    fields = {
        "runner_type": "generate",
        "model": str(weights_path()),
        "tokenizer": str(weights_path()),
        "tokenizer_revision": None,
        "trust_remote_code": False,
        "revision": None,
        "hf_text_config": SimpleNamespace(**text),
        "get_vocab_size": lambda: text["vocab_size"],
        "get_hidden_size": lambda: text["hidden_size"],
        "try_get_generation_config": dict,
        "logits_processors": None,
        "logprobs_mode": "raw_logprobs",
        "return_sampling_mask": False,
    }
    return SimpleNamespace(**(fields | changes))


def config(settings, *, v2=False, speculation=None, asynchronous=False, model=None, caching=True, **changes):
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_batch_sharded_sampling": False,
        "worker_cls": V2 if v2 else V1,
    }
    scheduler = {"scheduler_cls": None, "async_scheduling": asynchronous}
    for part in (parallel, scheduler):
        part |= {name: changes.pop(name) for name in list(changes) if name in part}
    return SimpleNamespace(
        **(
            {
                "additional_config": {} if settings is None else {"ace_learn": settings},
                "model_config": model or model_config(),
                "parallel_config": SimpleNamespace(**parallel),
                "scheduler_config": SimpleNamespace(**scheduler),
                "speculative_config": speculation,
                "lora_config": None,
                "kv_transfer_config": None,
                "cache_config": SimpleNamespace(enable_prefix_caching=caching, block_size=16),
                "watermark_config": None,
                "use_v2_model_runner": v2,
            }
            | changes
        )
    )


def drafter(
    method="eagle3", *, folder=None, target_layers=4, rejection="standard", adaptive=False, parallel=False, **draft
):
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=4,
        parallel_drafting=parallel,
        use_eagle_block_drop=lambda: True,
        draft_model_config=SimpleNamespace(
            hf_config=SimpleNamespace(**draft), model=str(folder or drafter_path()), revision=None
        ),
        target_model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=target_layers)),
        rejection_sample_method=rejection,
        enable_adaptive_verification=adaptive,
    )


@pytest.fixture(autouse=True)
def without_observer(monkeypatch):
    stub = SimpleNamespace(install_observer=lambda settings: None)  # it imports vLLM
    monkeypatch.setitem(sys.modules, "ace_learn.engines.vllm.observer", stub)
    monkeypatch.setattr("ace_learn.engines.vllm.validation.install_validation", lambda: None)  # so does this one


def classes_of(done):
    return (
        done.parallel_config.worker_cls,
        done.scheduler_config.scheduler_cls,
        done.model_config.logits_processors,
    )


def test_an_engine_that_is_not_configured_is_left_alone():
    for additional in ({}, {"other": 1}, object()):
        done = config(None)
        done.additional_config = additional
        configure(done)
        assert classes_of(done) == (V1, None, None)


def test_contracts_alone_change_the_scheduler_only():
    done = config({"contracts": {"n": {"kind": "integer"}}}, asynchronous=True, v2=True)
    configure(done)
    assert classes_of(done) == (V2, "ace_learn.engines.vllm.scheduler.AceAsyncScheduler", None)


@pytest.mark.parametrize("v2", [False, True])
def test_a_head_brings_a_worker_and_on_v2_a_processor(write_head, v2):
    done = config({"head": write_head()}, v2=v2, model=model_config(logits_processors=["a:B"] if v2 else None))
    for _ in range(2):  # the same however often
        configure(done)
    worker = "worker_gpu.AceGPUWorker" if v2 else "worker_cpu.AceCPUWorker"
    assert classes_of(done) == (
        f"ace_learn.engines.vllm.{worker}",
        "ace_learn.engines.vllm.scheduler.AceScheduler",
        ["a:B", "ace_learn.engines.vllm.processor:AceLogitsProcessor"] if v2 else None,
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline ranks lack"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_batch_sharded_sampling": True}, "batch-sharded"),
        ({"lora_config": object()}, "LoRA"),
        ({"worker_cls": "theirs.Worker"}, "worker of their own"),
        ({"scheduler_cls": "theirs.Scheduler"}, "scheduler of their own"),
        ({"model": model_config(runner_type="pooling")}, "text generation"),
    ],
)
def test_what_would_make_exits_wrong_is_refused(write_head, changes, why):
    with pytest.raises(ValueError, match=why):
        configure(config({"head": write_head()}, **changes))


def test_capped_logits_are_refused(write_head):
    model = model_config()
    model.hf_text_config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping 30\.0"):
        configure(config({"head": write_head()}, model=model))


def test_another_target_is_refused_naming_both_sides(write_head, identity):
    with pytest.raises(ValueError, match="hidden_size: 64 here, 128 there"):
        configure(config({"head": write_head(of=replace(identity, hidden_size=64))}))
    with pytest.raises(ValueError, match="fingerprint: 'aa' here"):
        configure(config({"head": write_head(of=replace(identity, fingerprint="aa"))}))


def test_weights_that_are_not_here_yet_are_compared_later(write_head, identity, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(weights_path(), folder)
    (folder / "model.safetensors").unlink()
    model = model_config(model=str(folder), tokenizer=str(folder))
    configure(config({"head": write_head(of=replace(identity, fingerprint="aa"))}, model=model))


def test_a_head_that_reads_candidates_is_refused(write_head):
    with pytest.raises(ValueError, match="candidates"):
        configure(config({"head": write_head(sources=("target_last", "candidates"))}))


def states(**changes):
    return DraftStates(**({"size": 128, "delay": 5, "drafter": weights_sha256(drafter_path())} | changes))


@pytest.mark.parametrize(
    ("of_head", "changes", "why"),
    [
        ({}, {"speculation": None}, "there is no speculation"),
        ({}, {"speculation": drafter("ngram")}, "drafts come from 'ngram'"),
        ({}, {"speculation": drafter(parallel=True)}, "drafts come from 'eagle3' in parallel"),
        ({"drafter": "aa"}, {}, "trained with another drafter.* here, aa there"),
        ({"delay": 4}, {}, "at most 3 tokens can be drafted, not 4"),
        ({"delay": 18}, {}, "only the last 17 tokens are run again"),
        ({}, {"kv_transfer_config": object()}, "KV connector"),
    ],
)
def test_the_drafters_states_need_the_drafter_of_the_head(write_head, of_head, changes, why):
    settings = {"head": write_head(sources=("draft",), draft=states(**of_head))}
    with pytest.raises(ValueError, match=why):
        configure(config(settings, **({"speculation": drafter()} | changes)))


@pytest.mark.parametrize("v2", [False, True])
def test_a_head_on_the_drafters_states_is_served_beside_its_drafter(write_head, v2):
    settings = {"head": write_head(sources=("draft", "scalars"), draft=states())}
    configure(config(settings, speculation=drafter(), v2=v2))
    configure(config(settings, speculation=drafter(folder="somebody/a-drafter")))  # compared later
    shown = {"head": write_head(sources=("draft",), draft=states(delay=18))}
    configure(config(shown, speculation=drafter(), caching=False))


def test_a_policy_that_reads_acceptance_is_refused(write_head):
    with pytest.raises(ValueError, match="calibrate a policy without acceptance"):
        configure(config({"head": write_head(thresholds={"acceptance": 0.5})}))


def test_target_aux_needs_a_drafter_that_taps_the_same_layers(write_head):
    settings = {"head": write_head(sources=("target_aux",))}
    for speculation, why in [
        (None, "no drafter taps any"),
        (drafter("draft_model"), "no drafter taps any"),
        (drafter(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), r"taps \[0, 1, 2\]"),
    ]:
        with pytest.raises(ValueError, match=why):
            configure(config(settings, speculation=speculation))
    configure(config(settings, speculation=drafter(eagle_aux_hidden_state_layer_ids=[3, 2, 1])))


def test_the_tapped_layers_are_found_as_vllm_finds_them():
    assert tapped_layers(None) is None
    assert tapped_layers(drafter("ngram")) is None
    assert tapped_layers(drafter(eagle_aux_hidden_state_layer_ids=[1, 3])) == (1, 3)
    assert tapped_layers(drafter(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})) == (1, 2)
    assert tapped_layers(drafter(eagle_config={"layer_ids": [0, 2]})) == (0, 2)
    assert tapped_layers(drafter(target_layers=32)) == (2, 16, 29)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"v2": False}, "use Model Runner V2"),
        ({"speculation": None}, "no draft is ever verified"),
        ({"speculation": drafter(rejection="block")}, "verified as a whole"),
        ({"speculation": drafter(adaptive=True)}, "adaptive verification"),
        ({"model": model_config(logprobs_mode="processed_logprobs")}, "processed log-probabilities"),
        ({"model": model_config(return_sampling_mask=True)}, "sampling mask"),
        ({"watermark_config": object()}, "watermark"),
    ],
)
def test_cactus_is_refused_where_it_cannot_be_right(changes, why):
    with pytest.raises(ValueError, match=why):
        configure(config({"acceptance": CACTUS}, **({"v2": True, "speculation": drafter()} | changes)))


def test_cactus_needs_no_head_unless_it_asks_who_thinks():
    done = config({"acceptance": CACTUS}, v2=True, speculation=drafter())
    configure(done)
    assert classes_of(done)[0] == "ace_learn.engines.vllm.worker_gpu.AceGPUWorker"
    only = {"acceptance": CACTUS | {"only_in_think": True}}
    with pytest.raises(ValueError, match="who thinks"):
        configure(config(only, v2=True, speculation=drafter()))


@pytest.mark.vllm
def test_stock_configurations_are_what_they_were_without_the_plugin(write_head):
    from vllm.engine.arg_utils import EngineArgs

    register()
    register()
    asked = {"model": str(weights_path()), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    stock = EngineArgs(**asked).create_engine_config()
    assert classes_of(stock) == (V1, None, None)
    settings = Settings(head=write_head()).to_json()
    ours = EngineArgs(**asked, additional_config={"ace_learn": settings}).create_engine_config()
    assert classes_of(ours)[:2] == (
        "ace_learn.engines.vllm.worker_cpu.AceCPUWorker",
        "ace_learn.engines.vllm.scheduler.AceScheduler",
    )
    with pytest.raises(ValueError, match="unknown setting"):
        EngineArgs(**asked, additional_config={"ace_learn": {"haed": "x"}}).create_engine_config()

"""Draft training runs: they learn, they resume, they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ace_learn.artifacts import is_temporary, read_fields
from ace_learn.drafts.config import DraftOptimizer, DraftShape, DraftTrainConfig, JointSignals, LoraOptions, Unrolling
from ace_learn.drafts.draft import fresh_mtp
from ace_learn.drafts.module import DraftModule
from ace_learn.drafts.train import train_draft
from ace_learn.heads import TrainerConfig, WeightingConfig
from ace_learn.models.draft_files import load_draft
from ace_learn.models.qwen3_next import ExpertsConfig
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.signals import LEARNED
from tests.helpers.targets import save_tiny, tiny_target

GOLDEN = Path(__file__).with_name("golden_losses.json")
FIXED = JointSignals(weighting=WeightingConfig())


@pytest.fixture
def config(dataset, model, tmp_path):
    return DraftTrainConfig(
        kind="eagle3",
        dataset=dataset,
        output=tmp_path / "draft",
        target=TargetConfig(model=str(model), device="cpu"),
        shape=DraftShape(vocab_size=48, intermediate_size=48),
        unrolling=Unrolling(steps=2),
        optimizer=DraftOptimizer(lr=5e-3, warmup_steps=2),
        trainer=TrainerConfig(accelerator="cpu", progress_bar=False),
        batch_size=6,
        max_epochs=3,
    )


@pytest.fixture(scope="module")
def trained(dataset, model, tmp_path_factory):
    """A finished draft with signal rows, to start from."""
    output = tmp_path_factory.mktemp("start") / "draft"
    train_draft(
        DraftTrainConfig(
            kind="eagle3",
            dataset=dataset,
            output=output,
            target=TargetConfig(model=str(model), device="cpu"),
            unrolling=Unrolling(steps=2),
            trainer=TrainerConfig(accelerator="cpu", progress_bar=False),
            max_epochs=1,
        )
    )
    return output


def weights_of(folder):
    return load_file(folder / "model.safetensors") | load_file(folder / "ace_head" / "model.safetensors")


EXPERTS = {"style": "qwen3_next", "experts": 4, "active_experts": 2, "expert_size": 24}
SHAPES = {
    "mimo": DraftShape(intermediate_size=48),
    "dense": DraftShape(intermediate_size=48, style="qwen3_next"),
    "experts": DraftShape(intermediate_size=48, **EXPERTS),
}
"""Of MTP drafts."""


@pytest.mark.parametrize("kind", ["eagle3", *SHAPES])
def test_the_folder_is_complete_and_loads(config, model, kind):
    if kind != "eagle3":
        config = replace(config, kind="mtp", shape=SHAPES[kind])
    report = train_draft(config)
    names = {path.name for path in config.output.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.json", "model.safetensors", "ace_head", "metrics.json", "curve.png", "config.yaml"),
        *("provenance.json", "logs", "checkpoints"),
    }
    draft = load_draft(config.output, load_target(config.target))
    assert draft.config.signals == LEARNED
    assert draft.config.block.intermediate_size == 48
    assert report.parameters == sum(weight.numel() for weight in draft.parameters())
    assert report.traces == (18, 6)
    assert report.coverage > 0.9
    assert len(report.draft.steps) == 2
    assert report.draft.signals is not None
    assert report.history[0]["train_losses"].keys() == {"token", *LEARNED}
    assert read_fields(config.output / "provenance.json").fields("inputs").text("dataset")
    assert any("tokens per verification" in line for line in report.lines())
    assert train_draft(config) == report  # a finished run is reported again


def test_golden_losses(config):
    report = train_draft(config)
    found = [{"train": epoch["train"], **epoch["validation_losses"]} for epoch in report.history]
    for epoch, golden in zip(found, json.loads(GOLDEN.read_text()), strict=True):
        assert epoch == pytest.approx(golden, rel=1e-4)
    assert found[-1]["token"] < found[0]["token"]


def test_a_run_interrupted_at_each_stage_ends_as_the_uninterrupted_one(config, tmp_path, monkeypatch):
    config = replace(config, optimizer=DraftOptimizer(lr=5e-3, matrix_rate=0.02, warmup_steps=2))
    step = DraftModule.training_step

    def interrupted_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 1:
            raise InterruptedError("in a step")
        return step(self, batch, batch_idx)

    def interrupted(*_, **__):
        raise InterruptedError("in the export")

    for name, replacement, stage in (
        ("ace_learn.drafts.module.DraftModule.training_step", interrupted_step, "in a step"),
        ("ace_learn.drafts.train.publish", interrupted, "in the export"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, replacement)
            with pytest.raises(InterruptedError, match=stage):
                train_draft(config)
        assert not (config.output / "config.json").exists()
    straight = replace(config, output=tmp_path / "straight")
    assert train_draft(config) == train_draft(straight)
    ours, theirs = weights_of(config.output), weights_of(straight.output)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not any(is_temporary(path) for path in config.output.iterdir())


def test_a_frozen_draft_is_exported_as_it_was(config, trained):
    config = replace(config, shape=DraftShape(), start_from=trained, freeze_draft=True, signals=FIXED)
    train_draft(config)
    before, after = weights_of(trained), weights_of(config.output)
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["ace_head.weight"]


def test_adapters_are_merged_at_export(config, trained):
    train_draft(replace(config, shape=DraftShape(), start_from=trained, lora=LoraOptions(rank=2, alpha=4)))
    before, after = weights_of(trained), weights_of(config.output)
    assert before.keys() == after.keys()
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert torch.linalg.matrix_rank(after["fc.weight"] - before["fc.weight"], rtol=1e-3) <= 2


def test_tokens_alone_leave_no_signal_rows(config, trained):
    report = train_draft(replace(config, shape=DraftShape(), start_from=trained, signals=None))
    assert report.draft.signals is None
    assert list(report.history[0]["train_losses"]) == ["token"]
    assert not (config.output / "ace_head").exists()
    assert load_draft(config.output, load_target(config.target)).config.signals == ()


def test_a_target_that_did_not_make_the_data_set_is_refused(config, tmp_path):
    other = save_tiny(tmp_path / "other", "qwen2")
    with pytest.raises(ValueError, match="was built with the target"):
        train_draft(replace(config, target=TargetConfig(model=str(other), device="cpu")))


def test_another_run_in_the_same_folder_is_refused(config):
    train_draft(replace(config, max_epochs=1))
    with pytest.raises(ValueError, match="belongs to another run: max_epochs is 1 there, 3 here"):
        train_draft(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_draft": True}, "name its folder in start_from"),
        ({"lora": LoraOptions()}, "name its folder in start_from"),
        ({"start_from": Path("x")}, r"leave out shape.intermediate_size, shape.vocab_size"),
        ({"kind": "mtp"}, r"reads no shape.vocab_size"),
        ({"shape": DraftShape(style="mimo")}, r"reads no shape.style"),
        ({"kind": "mtp", "shape": DraftShape(style="mimo"), "start_from": Path("x")}, r"leave out shape.style"),
        ({"trainer": TrainerConfig(devices=2)}, "one device"),
        ({"shape": DraftShape(), "start_from": Path("x"), "freeze_draft": True, "signals": None}, "needs signals"),
        ({"shape": DraftShape(), "start_from": Path("x"), "freeze_draft": True}, "weighting.kind fixed"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_tokens": 2}, "max_tokens"),
    ],
)
def test_what_would_be_ignored_is_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"experts": 4}, "shape.experts would be ignored"),
        ({"style": "mimo", "expert_size": 4}, "shape.expert_size would be ignored"),
        ({"style": "qwen3_next", "experts": 0, "active_experts": 1}, "is a dense layer"),
    ],
)
def test_experts_that_would_be_ignored_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        DraftShape(**shape)


def test_experts_are_the_targets_own_or_given_in_full():
    family, other = tiny_target("qwen3_next"), tiny_target("qwen3")
    block = fresh_mtp(DraftShape(style="qwen3_next"), family, signals=()).config
    assert (block.block.head_dim, block.block.rope_parameters["partial_rotary_factor"]) == (16, 0.25)
    assert block.experts == ExpertsConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
    )
    assert fresh_mtp(DraftShape(style="qwen3_next", experts=0), family, signals=()).config.experts is None
    assert fresh_mtp(DraftShape(style="qwen3_next"), other, signals=()).config.experts is None
    with pytest.raises(ValueError, match=r"set shape.experts, shape.active_experts and shape.expert_size"):
        fresh_mtp(DraftShape(style="qwen3_next", experts=4), other, signals=())


def test_a_block_of_mimo_reads_what_vllm_hands_on():
    target = tiny_target("qwen2")
    assert fresh_mtp(DraftShape(), target, signals=()).config.tap == "output"
    target.model.config.model_type = "mimo"
    assert fresh_mtp(DraftShape(), target, signals=()).config.tap == "stream"


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="unrolling"):
        Unrolling(steps=0)
    with pytest.raises(ValueError, match="offset"):
        JointSignals(offset=0)
    with pytest.raises(ValueError, match="rank"):
        LoraOptions(rank=0)
    with pytest.raises(ValueError, match="not read beside"):
        DraftOptimizer(matrix_rate=0.02, weight_decay=0.1)

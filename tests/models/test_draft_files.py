import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ace_learn.models.draft_files import load_draft, save_draft
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft
from ace_learn.models.eagle3_files import new_eagle3
from ace_learn.models.mtp import MimoConfig, MtpDraft
from ace_learn.models.mtp_files import new_mtp
from ace_learn.models.qwen3_next import Qwen3NextMtpConfig, partly_rotated
from tests.helpers.drafts import EXPERTS
from tests.helpers.targets import tiny_target

BLOCK = BlockConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
EAGLE3 = {
    "plain": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc_norm": {"fc_norm": True, "qk_norm": True},
    "biased": {"attention_bias": True, "signals": ("confidence", "progress")},
}

MTP = ("output", "stream", "dense", "experts")
"""The blocks of MiMo and of Qwen3-Next."""


def make(target, kind="plain"):
    if kind in ("output", "stream"):
        config = MimoConfig(block=BLOCK, vocab_size=target.vocab_size, tap=kind, signals=("progress",))
        return new_mtp(target, config).eval()
    if kind in ("dense", "experts"):
        experts = EXPERTS if kind == "experts" else None
        settings = {
            "block": partly_rotated(BLOCK, BLOCK.rope_parameters),
            "vocab_size": target.vocab_size,
            "signals": ("progress",),
        }
        return new_mtp(target, Qwen3NextMtpConfig(**settings, experts=experts)).eval()
    vocabulary = torch.arange(0, 40, 2)
    config = Eagle3Config(
        block=BLOCK, vocab_size=target.vocab_size, draft_vocab_size=20, target_hidden_size=32, aux_layers=(1, 2, 3),
        **EAGLE3[kind],
    )  # fmt: skip
    return new_eagle3(target, config, vocabulary).eval()


def said(draft):
    torch.manual_seed(0)
    size = 96 if isinstance(draft, Eagle3Draft) else 32
    tokens, aux = torch.randint(0, 50, (2, 9)), torch.randn(2, 9, size)
    with torch.no_grad():
        outputs = draft.unroll(tokens, draft.fuse(aux), 2)
        signals = [draft.signal_logits(o.read) for o in outputs] if draft.config.signals else []
        return torch.cat([draft.full_logits(o.read) for o in outputs] + signals, dim=-1)


@pytest.mark.parametrize("kind", [*EAGLE3, *MTP])
def test_a_saved_draft_says_the_same(tmp_path, kind):
    target = tiny_target("qwen3")
    draft = make(target, kind)
    save_draft(tmp_path, draft, target.identity)
    loaded = load_draft(tmp_path, target)
    assert isinstance(loaded, MtpDraft if kind in MTP else Eagle3Draft)
    assert loaded.config == draft.config
    assert torch.equal(said(loaded), said(draft))
    assert loaded.shared_embeddings.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    vllm_reads = load_file(tmp_path / "model.safetensors")
    assert not any("ace_head" in name for name in vllm_reads)


def test_the_speculators_layout_is_read_as_vllm_reads_it(tmp_path):
    target = tiny_target("llama")
    draft = make(target, "norms")
    save_draft(tmp_path, draft, target.identity)
    flat = json.loads((tmp_path / "config.json").read_text())
    block = {name: flat[name] for name in ("model_type", "num_hidden_layers", "vocab_size", "attention_bias")}
    block |= {name: value for name, value in BLOCK.to_json().items() if name != "rope_parameters"}
    outer = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 20,
        "model_type": "qwen3",  # of the speculator; the layer's own says how it attends
        "target_hidden_size": None, "norm_before_fc": True, "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "transformer_layer_config": block | {"rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(outer))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    weights["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_draft(tmp_path, target)
    assert loaded.config.norm_before_residual  # what speculators leaves out
    assert loaded.config.own_embeddings
    assert torch.equal(said(loaded), said(draft))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"vocab_size": 999}, "vocabulary 999 in the draft"),
        ({"target_hidden_size": 64}, "hidden size of the target 64 in the draft, 32 in the target"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}, r"tapped layers \(1, 2, 30\) in the draft, 4 layers"),
        ({"draft_vocab_size": 19}, "do not give 19 ascending tokens"),
        ({"intermediate_size": 128}, "not those that its config.json describes"),
        ({"speculators_model_type": "peagle"}, "peagle"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, changes, message):
    target = tiny_target("llama")
    save_draft(tmp_path, make(target), target.identity)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, target)


def test_pickles_are_never_loaded(tmp_path):
    target = tiny_target("llama")
    save_draft(tmp_path, make(target), target.identity)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickle.*weights_only=True"):
        load_draft(tmp_path, target)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_draft(tmp_path, target)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    target = tiny_target("llama")
    save_draft(tmp_path, make(target), target.identity)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"t2d": weights["t2d"].roll(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="t2d marks other tokens"):
        load_draft(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="damaged"):
        load_draft(tmp_path, target)


def test_a_draft_of_another_target_is_refused_naming_both(tmp_path):
    target, other = tiny_target("llama"), tiny_target("llama", layers=5)
    save_draft(tmp_path, make(target), target.identity)
    with pytest.raises(ValueError, match="num_layers: 4 here, 5 there"):
        load_draft(tmp_path, other)
    sibling = tiny_target("llama", seed=1)
    assert isinstance(load_draft(tmp_path, sibling), Eagle3Draft)


def test_another_tokenizer_is_refused(tmp_path):
    target = tiny_target("llama")
    save_draft(tmp_path, make(target), target.identity)
    edit(tmp_path, ace_learn=None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["ace_learn"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    target.tokenizer.save_pretrained(tmp_path / "tokens")
    tokens = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    shutil.copy(tmp_path / "tokens" / "tokenizer_config.json", tmp_path)
    with pytest.raises(ValueError, match="different tokenizers"):
        load_draft(tmp_path, target)


def test_of_a_whole_model_in_shards_its_mtp_layer_alone_is_read(tmp_path):
    target = tiny_target("qwen2")
    draft = make(target, "stream")
    save_draft(tmp_path, draft, target.identity)
    weights = load_file(tmp_path / "model.safetensors")
    of_mtp = {name: weight for name, weight in weights.items() if "mtp_layers" in name}
    trunk = {name: weight.contiguous() for name, weight in target.model.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    save_file(trunk, tmp_path / "model-00001-of-00002.safetensors")
    save_file(of_mtp, tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(said(load_draft(tmp_path, target)), said(draft))

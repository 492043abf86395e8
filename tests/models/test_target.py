"""Loading targets: identity, refusals with remedies."""

import json

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, RwkvConfig, RwkvForCausalLM

from ace_learn.models.identity import TargetIdentity
from ace_learn.models.target import Target, TargetConfig, ThinkConfig, fingerprint, load_target
from ace_learn.thinking import ThinkMarkers
from tests.helpers.targets import save_tiny, tiny_model, tiny_target, tiny_tokenizer


def test_load_from_a_folder(tmp_path):
    target = load_target(TargetConfig(model=str(save_tiny(tmp_path, "qwen2")), device="cpu"))
    assert target.identity.hidden_size == 32
    assert target.identity.num_layers == len(target.layers) == 4
    assert target.stop_ids == {1}
    assert target.default_aux_layers() == (1, 2, 3)
    assert target.decode([8, 17]) == ".\n\n\\boxed{7}"


def test_fingerprint_tells_weights_apart_and_ignores_the_dtype():
    model = tiny_model(seed=1)
    before = fingerprint(model)
    assert fingerprint(tiny_model(seed=1).to(torch.bfloat16)) == before
    assert fingerprint(tiny_model(seed=2)) != before
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    assert fingerprint(model) != before


def test_identity_round_trip_and_mismatch_names_both_sides():
    one, other = tiny_target(seed=1).identity, tiny_target("llama", seed=2).identity
    assert TargetIdentity.from_json(json.loads(json.dumps(one.to_json()))) == one
    (line,) = one.mismatches(other)
    assert one.fingerprint in line
    assert other.fingerprint in line
    assert one.mismatches(one) == []
    with pytest.raises(ValueError, match="not a target identity"):
        TargetIdentity.from_json({**one.to_json(), "markers": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "no/such/model"}, "cannot load the model"),
        ({"dtype": "float8"}, "unknown dtype"),
        ({"think": ThinkConfig(start="<reason>")}, "no think marker"),
    ],
)
def test_refusals(tmp_path, change, message):
    folder = str(save_tiny(tmp_path))
    with pytest.raises(ValueError, match=message):
        load_target(TargetConfig(**{"model": folder, "device": "cpu", **change}))


def test_a_folder_that_holds_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_target(TargetConfig(model=str(tmp_path)))


def test_sliding_windows_are_refused():
    config = MistralConfig(
        vocab_size=62, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"sliding_attention.*full_attention alone"):
        Target(MistralForCausalLM(config), tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name="windowed")


@pytest.mark.parametrize("kind", ["named", "unnamed"])
def test_recurrent_layers_are_refused_since_a_rejected_draft_would_stay_in_them(kind):
    tokenizer = tiny_tokenizer()
    if kind == "named":
        model = tiny_model("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    else:
        config = RwkvConfig(vocab_size=62, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
        model = RwkvForCausalLM(config)
    with pytest.raises(ValueError, match=r"(linear_attention|recurrent), and .*cannot be taken back.*serve it in vLLM"):
        Target(model, tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name="recurrent")

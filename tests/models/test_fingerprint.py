import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ace_learn.models.fingerprint import checkpoint_fingerprint, fingerprint
from ace_learn.reasoner import weights_path


def small_model(*, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_a_checkpoint_has_the_fingerprint_of_the_model_that_is_loaded_from_it(tmp_path, tied, shard):
    model = small_model(tied=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard == "4KB")
    assert checkpoint_fingerprint(tmp_path, tied=tied) == fingerprint(model)
    assert fingerprint(LlamaForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)


def test_another_dtype_keeps_it_and_another_value_changes_it(tmp_path):
    model = small_model(tied=False)
    before = fingerprint(model)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert checkpoint_fingerprint(tmp_path, tied=False) == before
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, tmp_path / "model.safetensors")
    assert checkpoint_fingerprint(tmp_path, tied=False) not in (None, before)


def test_no_safetensors_have_no_fingerprint(tmp_path):
    assert checkpoint_fingerprint(tmp_path, tied=False) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert checkpoint_fingerprint(tmp_path, tied=False) is None
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_fingerprint(tmp_path, tied=False) is None


def test_the_embedded_reasoner_is_found_without_loading_it():
    card = json.loads((weights_path() / "config.json").read_text())
    assert checkpoint_fingerprint(weights_path(), tied=card["tie_word_embeddings"]) is not None

"""The block of Qwen3-Next against its formulas, written out over the weights of a saved checkpoint."""

import json
from math import cos, sin

import pytest
import torch
from safetensors.torch import load_file, save_file

from ace_learn.models.draft_files import load_draft, save_draft
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.mtp_files import new_mtp
from ace_learn.models.qwen3_next import ExpertsConfig, Qwen3NextDraft, Qwen3NextMtpConfig, partly_rotated
from tests.helpers.targets import tiny_target

HEADS, KV_HEADS, HEAD_DIM, ROTATED = 4, 2, 16, 4
BLOCK = BlockConfig(
    hidden_size=32, intermediate_size=24, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM
)
EXPERTS = ExpertsConfig(
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20
)
KINDS = {"dense": None, "experts": EXPERTS}


def make(target, experts, **changes):
    torch.manual_seed(0)
    config = Qwen3NextMtpConfig(
        block=partly_rotated(BLOCK, BLOCK.rope_parameters), vocab_size=target.vocab_size, experts=experts, **changes
    )
    draft = new_mtp(target, config).eval()
    for name, weight in draft.named_parameters():
        torch.nn.init.uniform_(weight, -0.5, 0.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.3)
    return draft


def normed(x, weight):
    return x / (x.square().mean() + 1e-6).sqrt() * (1 + weight)


def rotated(x, position):
    """Of the first ROTATED dimensions, i and i + ROTATED / 2 are turned together; the others stay."""
    out, half = x.clone(), ROTATED // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / ROTATED)
        out[i] = x[i] * cos(angle) - x[i + half] * sin(angle)
        out[i + half] = x[i + half] * cos(angle) + x[i] * sin(angle)
    return out


def gated(weights, name, x):
    up = weights[f"{name}.up_proj.weight"] @ x
    return weights[f"{name}.down_proj.weight"] @ (
        torch.nn.functional.silu(weights[f"{name}.gate_proj.weight"] @ x) * up
    )


def feed_forward(weights, x, experts):
    if experts is None:
        return gated(weights, "mtp.layers.0.mlp", x)
    laws = (weights["mtp.layers.0.mlp.gate.weight"] @ x).softmax(-1)
    chosen = laws.argsort(descending=True)[: experts.num_experts_per_tok].tolist()
    total = laws[chosen].sum() if experts.norm_topk_prob else 1.0
    routed = sum(laws[e] / total * gated(weights, f"mtp.layers.0.mlp.experts.{e}", x) for e in chosen)
    share = torch.sigmoid(weights["mtp.layers.0.mlp.shared_expert_gate.weight"] @ x)
    return routed + share * gated(weights, "mtp.layers.0.mlp.shared_expert", x)


def by_hand(weights, tokens, hidden, experts):
    """What the output layer reads at every position of one sequence."""
    attention, keys, values, rows = "mtp.layers.0.self_attn", [], [], []
    for place, (token, state) in enumerate(zip(tokens, hidden, strict=True)):
        embedded = weights["model.embed_tokens.weight"][token]
        both = [
            normed(embedded, weights["mtp.pre_fc_norm_embedding.weight"]),
            normed(state, weights["mtp.pre_fc_norm_hidden.weight"]),
        ]
        stream = weights["mtp.fc.weight"] @ torch.cat(both)
        x = normed(stream, weights["mtp.layers.0.input_layernorm.weight"])
        asked = (weights[f"{attention}.q_proj.weight"] @ x).view(HEADS, 2, HEAD_DIM)
        own = (weights[f"{attention}.k_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM)
        keys.append([rotated(normed(k, weights[f"{attention}.k_norm.weight"]), place) for k in own])
        values.append((weights[f"{attention}.v_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM))
        mixed = []
        for head, (query, gate) in enumerate(asked):
            query, of = rotated(normed(query, weights[f"{attention}.q_norm.weight"]), place), head * KV_HEADS // HEADS
            scores = torch.stack([query @ k[of] for k in keys]) / HEAD_DIM**0.5
            mixed.append(scores.softmax(-1) @ torch.stack([v[of] for v in values]) * torch.sigmoid(gate))
        stream = stream + weights[f"{attention}.o_proj.weight"] @ torch.cat(mixed)
        x = normed(stream, weights["mtp.layers.0.post_attention_layernorm.weight"])
        rows.append(normed(stream + feed_forward(weights, x, experts), weights["mtp.norm.weight"]))
    return torch.stack(rows)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_block_is_that_of_the_formulas(tmp_path, kind, normalised):
    target, experts = tiny_target("qwen3"), KINDS[kind]
    if experts is not None:
        experts = ExpertsConfig(**{**experts.to_json(), "norm_topk_prob": normalised})
    draft = make(target, experts)
    save_draft(tmp_path, draft, target.identity)
    weights = load_file(tmp_path / "model.safetensors")
    tokens, hidden = torch.randint(0, target.vocab_size, (2, 9)), torch.randn(2, 9, 32)
    output = draft.unroll(torch.nn.functional.pad(tokens, (1, 0)), torch.nn.functional.pad(hidden, (0, 0, 0, 1)), 1)[0]
    assert torch.equal(output.read, output.fed_back)
    for row in range(2):
        expected = by_hand(weights, tokens[row].tolist(), hidden[row], experts)
        assert torch.allclose(output.read[row, :9], expected, atol=1e-4)
    logits = draft.full_logits(output.read)
    assert torch.allclose(logits, output.read @ weights["lm_head.weight"].T, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns_and_the_shared_ones_do_not(kind):
    draft = make(tiny_target("qwen3"), KINDS[kind], signals=("progress",)).train()
    outputs = draft.unroll(torch.randint(0, 50, (4, 12)), torch.randn(4, 12, 32), 3)
    loss = sum(draft.logits(o.read).square().mean() + draft.signal_logits(o.read).square().mean() for o in outputs)
    loss.backward()
    assert not any("shared_" in name and "expert" not in name for name, _ in draft.named_parameters())
    assert [name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_layout_is_the_published_one(tmp_path):
    target = tiny_target("qwen3")
    save_draft(tmp_path, make(target, EXPERTS, signals=("progress",)), target.identity)
    shapes = {name: tuple(weight.shape) for name, weight in load_file(tmp_path / "model.safetensors").items()}
    layer, attention = "mtp.layers.0", "mtp.layers.0.self_attn"
    assert shapes == {
        "mtp.pre_fc_norm_embedding.weight": (32,),
        "mtp.pre_fc_norm_hidden.weight": (32,),
        "mtp.fc.weight": (32, 64),
        "mtp.norm.weight": (32,),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        f"{attention}.q_proj.weight": (2 * HEADS * HEAD_DIM, 32),
        f"{attention}.k_proj.weight": (KV_HEADS * HEAD_DIM, 32),
        f"{attention}.v_proj.weight": (KV_HEADS * HEAD_DIM, 32),
        f"{attention}.o_proj.weight": (32, HEADS * HEAD_DIM),
        f"{attention}.q_norm.weight": (HEAD_DIM,),
        f"{attention}.k_norm.weight": (HEAD_DIM,),
        f"{layer}.mlp.gate.weight": (5, 32),
        f"{layer}.mlp.shared_expert_gate.weight": (1, 32),
        f"{layer}.mlp.shared_expert.gate_proj.weight": (20, 32),
        f"{layer}.mlp.shared_expert.up_proj.weight": (20, 32),
        f"{layer}.mlp.shared_expert.down_proj.weight": (32, 20),
        **{f"{layer}.mlp.experts.{e}.{part}_proj.weight": (12, 32) for e in range(5) for part in ("gate", "up")},
        **{f"{layer}.mlp.experts.{e}.down_proj.weight": (32, 12) for e in range(5)},
        "model.embed_tokens.weight": (target.vocab_size, 32),
        "lm_head.weight": (target.vocab_size, 32),
    }


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))


@torch.no_grad()
def test_a_published_model_is_read(tmp_path):
    """In shards, with a trunk, and a config of transformers 4, which says elsewhere how much of a head is rotated."""
    target = tiny_target("qwen3")
    draft = make(target, EXPERTS)
    save_draft(tmp_path, draft, target.identity)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    for shard, part in enumerate((names[::2], names[1::2])):
        trunk = {f"model.layers.{shard}.linear_attn.A_log": torch.zeros(3)}
        save_file(
            {name: weights[name] for name in part} | trunk, tmp_path / f"model-0000{shard + 1}-of-00002.safetensors"
        )
    edit(
        tmp_path, ace_learn="gone", rope_parameters="gone", num_nextn_predict_layers="gone", layer_types="gone",
        rope_theta=10000.0, rope_scaling=None, partial_rotary_factor=0.25, full_attention_interval=4,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    loaded = load_draft(tmp_path, target)
    assert isinstance(loaded, Qwen3NextDraft)
    assert loaded.config.experts == EXPERTS
    tokens, hidden = torch.randint(0, 50, (2, 9)), torch.randn(2, 9, 32)
    for ours, theirs in zip(draft.unroll(tokens, hidden, 3), loaded.unroll(tokens, hidden, 3), strict=True):
        assert torch.equal(ours.read, theirs.read)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_5_moe"}, "model_type is 'qwen3_5_moe'; a draft is supported with 'qwen3_next' alone"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_scale": True}, "layer_scale is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_experts": 6}, r"describes 6 experts.*no weight layers.0.mlp.experts.5.gate_proj.weight"),
        ({"num_experts": 4}, "not those that its config.json describes"),
        ({"num_experts": 0}, "not those that its config.json describes"),
        ({"mlp_only_layers": [0]}, "not those that its config.json describes"),
        ({"decoder_sparse_step": 2}, "not those that its config.json describes"),
        ({"num_experts_per_tok": 9}, "to 1 to 5 of so many experts, not to 9"),
        ({"shared_expert_intermediate_size": 0}, "at least 1 wide"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}},
            "rotates 3 of",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"vocab_size": 999}, "999 tokens in the draft"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, changes, message):
    target = tiny_target("qwen3")
    save_draft(tmp_path, make(target, EXPERTS), target.identity)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, target)

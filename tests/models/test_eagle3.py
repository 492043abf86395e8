import pytest
import torch

from ace_learn.models.cache import SlotCache
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft

BLOCK = BlockConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
VARIANTS = {
    "plain": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "biased": {"attention_bias": True, "signals": ("confidence", "progress")},
}


def make(variant="plain", **changes):
    settings = {"block": BLOCK, "vocab_size": 50, "draft_vocab_size": 20, "target_hidden_size": 32}
    config = Eagle3Config(**settings, aux_layers=(1, 2, 3), **VARIANTS[variant], **changes)
    draft = Eagle3Draft(config, torch.arange(0, 40, 2), torch.randn(50, 32)).eval()
    for name, weight in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return draft


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_training_sees_what_decoding_sees(variant):
    """Output j of the unrolled draft at anchor p is the j-th step of drafting behind position p."""
    draft = make(variant)
    tokens, aux = torch.randint(0, 50, (2, 12)), torch.randn(2, 12, 96)
    hidden = draft.fuse(aux)
    outputs = draft.unroll(tokens, hidden, 4)
    for anchor in (0, 3, 7):
        cache, places = SlotCache(1, 2), torch.arange(anchor + 1).expand(2, -1)
        out = draft.decode(tokens[:, 1 : anchor + 2], hidden[:, : anchor + 1], places, cache, longest=anchor + 1)
        assert torch.allclose(out.read, outputs[0].read[:, : anchor + 1], atol=1e-5)
        for j in range(1, 4):
            p = anchor + j
            out = draft.decode(
                tokens[:, p + 1 : p + 2], out.fed_back[:, -1:], torch.full((2, 1), p), cache, longest=p + 1
            )
            assert torch.allclose(out.read[:, 0], outputs[j].read[:, anchor], atol=1e-5)


@torch.no_grad()
def test_drafts_are_spread_over_the_targets_vocabulary():
    draft = make()
    read = torch.randn(1, 3, 32)
    full, own = draft.full_logits(read), draft.logits(read)
    assert full.shape == (1, 3, 50)
    assert torch.equal(full[..., draft.vocabulary], own)
    assert int(full.isneginf().sum()) == 3 * 30
    assert draft.d2t.tolist() == list(range(20))
    assert draft.to_draft[[0, 1, 2, 38, 49]].tolist() == [0, -1, 1, 19, -1]


def test_every_weight_learns_and_the_shared_embeddings_do_not():
    draft = make("biased")
    outputs = draft.unroll(torch.randint(0, 50, (2, 8)), draft.fuse(torch.randn(2, 8, 96)), 3)
    loss = sum(draft.logits(o.read).square().mean() + draft.signal_logits(o.read).square().mean() for o in outputs)
    loss.backward()
    assert not any("embed" in name for name, _ in draft.named_parameters())
    still = [name for name, weight in draft.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert still == ["midlayer.self_attn.k_proj.bias"] or still == []  # softmax ignores a bias of the keys, nearly


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_layers": (3, 1, 2)}, "ascend"),
        ({"aux_layers": (1, 1, 2)}, "distinct"),
        ({"draft_vocab_size": 51}, "1 to 50"),
        ({"target_hidden_size": 64}, "own_embeddings"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    settings = {"block": BLOCK, "vocab_size": 50, "draft_vocab_size": 20, "target_hidden_size": 32}
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**(settings | {"aux_layers": (1, 2, 3)} | changes))

import pytest
import torch

from ace_learn.drafts.adapters import Adapters
from ace_learn.drafts.config import JointSignals, LoraOptions
from ace_learn.drafts.data import collate
from ace_learn.drafts.module import activation_norms
from ace_learn.heads.losses import LossWeights
from ace_learn.heads.weighting import WeightingConfig
from tests.drafts.corpus import make_draft, make_module, sampled_traces

FIXED = JointSignals(weighting=WeightingConfig(), token=2.0, losses=LossWeights(remaining=0.5))


def trained(module, steps, lr):
    batch = collate(sampled_traces())
    weights = [weight for weight in module.draft.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
    with torch.no_grad():
        return module.outcome(batch)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "qwen3_next"])
def test_a_draft_memorises_a_small_corpus(kind):
    module = make_module(make_draft(kind, vocab_size=57), signals=JointSignals() if kind == "eagle3" else None)
    with torch.no_grad():
        before = module.outcome(collate(sampled_traces())).tokens
    after = trained(module, 300, lr=1e-2)
    assert (before.acceptance / before.rows).max() < 0.6
    assert (after.tokens.acceptance / after.tokens.rows).min() > 0.92
    assert after.tokens.acceptance_length() > 3.65  # of 4
    if after.signals is not None:
        assert (after.signals.means() < torch.tensor([0.01, 0.01, 0.2, 0.1])).all()


def test_no_task_pushes_the_shared_states_further_than_another():
    module = make_module(make_draft(), signals=JointSignals(token=4.0))
    outcome = module.outcome(collate(sampled_traces()))
    losses = torch.cat((outcome.tokens.objective(module.get_buffer("_step_weights"))[None], outcome.signals.means()))
    norms = activation_norms(losses, outcome.shared)
    module.training_step(collate(sampled_traces()), 0)
    pushes = module._steps[-1].weights * norms
    torch.testing.assert_close(pushes[1:], pushes[1].expand(4), rtol=1e-3, atol=0)
    torch.testing.assert_close(pushes[0], 4 * pushes[1], rtol=1e-3, atol=0)


def test_fixed_weights_are_those_of_the_recipe():
    module = make_module(make_draft(), signals=FIXED)
    module.training_step(collate(sampled_traces()), 0)
    step = module._steps[-1]
    assert step.weights.tolist() == pytest.approx([2.0, 1.0, 1.0, 0.5, 1.0])
    assert step.norms is None
    assert step.loss.item() == pytest.approx((step.losses * step.weights).sum().item())


def test_the_target_is_no_part_of_the_module():
    module = make_module(make_draft())
    assert not any("target" in name or "shared_embeddings" in name for name in module.state_dict())
    module.training_step(collate(sampled_traces()), 0).backward()
    assert all(weight.grad is None for weight in module._target.model.parameters())


def test_a_frozen_draft_stays_and_its_signal_rows_learn():
    draft = make_draft()
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    module = make_module(draft, signals=JointSignals(weighting=WeightingConfig()), freeze_draft=True)
    with torch.no_grad():
        first = module.outcome(collate(sampled_traces())).signals.means()
    last = trained(module, 60, lr=2e-2).signals.means()
    changed = [name for name, weight in draft.state_dict().items() if not torch.equal(weight, before[name])]
    assert changed == ["ace_head.weight"]
    assert last.sum() < 0.5 * first.sum()


def test_adapters_train_alone_and_merge_into_the_weights():
    draft = make_draft()
    names, before = list(draft.state_dict()), {n: w.clone() for n, w in draft.state_dict().items()}
    adapters = Adapters(draft, LoraOptions(rank=4, alpha=8))
    trainable = {name for name, weight in draft.named_parameters() if weight.requires_grad}
    assert "ace_head.weight" in trainable
    assert all("lora_" in name or name == "ace_head.weight" for name in trainable)
    outcome = trained(make_module(draft), 20, lr=1e-2)
    adapters.merge()
    assert list(draft.state_dict()) == names
    changed = {name for name, weight in draft.state_dict().items() if not torch.equal(weight, before[name])}
    layers = {
        "fc",
        *(f"midlayer.self_attn.{p}_proj" for p in "qkvo"),
        *(f"midlayer.mlp.{p}_proj" for p in ("gate", "up", "down")),
    }
    assert changed == {"ace_head.weight", *(f"{layer}.weight" for layer in layers)}
    with torch.no_grad():
        merged = make_module(draft).outcome(collate(sampled_traces()))
    torch.testing.assert_close(merged.shared, outcome.shared, rtol=1e-4, atol=1e-4)


def test_adapters_leave_routed_experts_as_they_are():
    draft = make_draft("qwen3_next")
    names, before = list(draft.state_dict()), {n: w.clone() for n, w in draft.state_dict().items()}
    adapters = Adapters(draft, LoraOptions(rank=4, alpha=8))
    trained(make_module(draft), 5, lr=1e-2)
    adapters.merge()
    assert list(draft.state_dict()) == names
    changed = {name for name, weight in draft.state_dict().items() if not torch.equal(weight, before[name])}
    layers = {
        "fc",
        *(f"layers.0.self_attn.{p}_proj" for p in "qkvo"),
        *(f"layers.0.mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")),
    }
    assert changed == {"ace_head.weight", *(f"{layer}.weight" for layer in layers)}

"""Gradient weights by hand, by their laws, and against a task that would drown the others."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ace_learn.heads import HeadConfig, LossWeights, SignalHead, TrainConfig, WeightingConfig
from ace_learn.heads.losses import member_sums
from ace_learn.heads.weighting import FixedWeighting, GradientWeighting, gradient_norms, inverse_weights


def _losses(parameter: Tensor, *coefficients: tuple[float, float]) -> Tensor:
    """One member, linear losses, whose gradients are the coefficients."""
    return torch.stack([(parameter * torch.tensor(each)).sum() for each in coefficients]).unsqueeze(0)


def test_two_tasks_by_hand() -> None:
    shared = nn.Parameter(torch.zeros(1, 2))
    weighting = GradientWeighting(torch.ones(2, dtype=torch.bool), members=1, smoothing=0.5)
    seen = torch.ones(2, dtype=torch.bool)
    # norms 5 and 1: weights 1/5 : 1, which sum to 2
    weights, norms = weighting(_losses(shared, (3, 4), (0, 1)), seen, [shared])
    assert norms.tolist() == [[5, 1]]
    assert weights.tolist()[0] == pytest.approx([2 / 6, 10 / 6], rel=1e-3)
    assert not weights.requires_grad
    # smoothed norms (5 + 1) / 2 = 3 and (1 + 1) / 2 = 1: weights 1/3 : 1
    weights, norms = weighting(_losses(shared, (0, 1), (1, 0)), seen, [shared])
    assert norms.tolist() == [[1, 1]]
    assert weights.tolist()[0] == pytest.approx([2 / 4, 6 / 4], rel=1e-3)


def test_a_task_without_rows_keeps_its_norm_and_an_unseen_one_has_no_weight() -> None:
    shared = nn.Parameter(torch.zeros(1, 2))
    weighting = GradientWeighting(torch.tensor([True, True, False]), members=1, smoothing=0.0)
    losses = _losses(shared, (2, 0), (0, 1), (1, 1))
    only_first = torch.tensor([True, False, True])
    assert weighting(losses, only_first, [shared]).weights.tolist() == [[1, 0, 0]]
    weighting(losses, torch.tensor([True, True, True]), [shared])
    weights = weighting(_losses(shared, (4, 0), (0, 9), (1, 1)), only_first, [shared]).weights
    assert weights.tolist()[0] == pytest.approx([2 / 5, 8 / 5, 0], rel=1e-3)


def test_norms_equal_one_backward_pass_per_task_and_member() -> None:
    torch.manual_seed(0)
    head = SignalHead(HeadConfig(width=5, members=3, dropout=0.2), 7).train()
    losses = member_sums(head.members_raw(torch.randn(11, 7)), torch.rand(11, 4)).means()
    found = gradient_norms(losses, head.shared_parameters())
    for member in range(3):
        for task in range(4):
            gradients = torch.autograd.grad(losses[member, task], head.shared_parameters(), retain_graph=True)
            by_hand = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
            assert found[member, task].item() == pytest.approx(by_hand, rel=1e-5)
    losses.sum().backward()  # the graph is still there


_NORMS = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=5)


@given(_NORMS, st.floats(1e-3, 1e3))
def test_laws_of_the_weights(norms: list[float], factor: float) -> None:
    values = torch.tensor([norms], dtype=torch.float64)
    active = torch.ones_like(values, dtype=torch.bool)
    weights = inverse_weights(values, active)
    assert weights.sum().item() == pytest.approx(len(norms))
    assert (weights > 0).all()
    assert torch.equal(weights[0].argsort(descending=True, stable=True)[:1], values[0].argsort(stable=True)[:1])
    torch.testing.assert_close(inverse_weights(values * factor, active), weights, rtol=1e-6, atol=0)


def test_a_task_without_any_gradient_leaves_finite_weights() -> None:
    weights = inverse_weights(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool))
    assert weights.isfinite().all()
    assert weights[0, 0] > weights[0, 1] > 0
    assert weights[1].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["fixed", "gradient"])
def test_a_task_scaled_by_a_thousand_drowns_the_others_only_under_fixed_weights(kind: str) -> None:
    """A task of pure noise, scaled by 1,000, against one that can be learned, through two shared units."""
    torch.manual_seed(0)
    rows = torch.randn(512, 8)
    targets = torch.zeros(512, 4)
    targets[:, 0] = torch.randint(0, 2, (512,)).float()
    targets[:, 1] = rows[:, 0].gt(0).float()
    targets[:, 2:] = math.nan
    head = SignalHead(HeadConfig(arch="mlp", width=2), 8)
    weighting = (
        FixedWeighting(torch.ones(4))
        if kind == "fixed"
        else GradientWeighting(torch.ones(4, dtype=torch.bool), members=1, smoothing=0.9)
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    for index in torch.randint(0, 512, (300, 32)):
        sums = member_sums(head.members_raw(rows[index]), targets[index])
        losses = sums.means() * torch.tensor([1000.0, 1.0, 1.0, 1.0])
        weights = weighting(losses, sums.rows > 0, head.shared_parameters()).weights
        optimizer.zero_grad()
        (losses * weights).sum(-1).mean().backward()
        optimizer.step()
    learned = member_sums(head.members_raw(rows), targets).means()[0, 1].item()
    assert (learned < 0.05) == (kind == "gradient"), learned


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_is_checked(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"weighting\.smoothing must be at least 0 and below 1"):
        WeightingConfig(kind="gradient", smoothing=smoothing)


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which fixed weights do not read"):
        WeightingConfig(smoothing=0.5)
    with pytest.raises(ValueError, match="a linear head has none"):
        TrainConfig(
            dataset=tmp_path,
            output=tmp_path,
            head=HeadConfig(arch="linear"),
            weighting=WeightingConfig(kind="gradient"),
        )


def test_a_signal_with_weight_0_is_not_active() -> None:
    assert (LossWeights(remaining=0.0).tensor() > 0).tolist() == [True, True, False, True]

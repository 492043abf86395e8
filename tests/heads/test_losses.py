"""Losses by hand: undefined targets count nothing, weights are fixed."""

import math

import pytest
import torch

from ace_learn.heads.losses import LossWeights, class_weights, loss_sums, member_sums

_NAN = math.nan

# logits 0 -> 0.5, log 3 -> 0.75, log1p(3 tokens) = log 4
_RAW = torch.tensor([[0.0, math.log(3), math.log(4), 0.0], [0.0, 0.0, 0.0, math.log(3)]])
_TARGETS = torch.tensor([[1.0, 0.25, 3.0, 1.0], [0.5, _NAN, math.e - 1, _NAN]])


def test_worked_by_hand() -> None:
    sums = loss_sums(_RAW, _TARGETS)
    # confidence (0.5-1)^2 + (0.5-0.5)^2; progress (0.75-0.25)^2; remaining (log4-log4)^2 + (0-1)^2; -log 0.5
    torch.testing.assert_close(sums.total, torch.tensor([0.25, 0.25, 1.0, math.log(2)]))
    assert sums.rows.tolist() == [2, 1, 2, 1]
    torch.testing.assert_close(sums.means(), torch.tensor([0.125, 0.25, 0.5, math.log(2)]))
    weights = LossWeights(confidence=1.0, progress=2.0, remaining=0.1, consistency=3.0).tensor()
    assert sums.weighted(weights).item() == pytest.approx(0.125 + 0.5 + 0.05 + 3 * math.log(2))


def test_sums_over_batches_are_exact() -> None:
    whole = loss_sums(_RAW, _TARGETS)
    parts = loss_sums(_RAW[:1], _TARGETS[:1]).plus(loss_sums(_RAW[1:], _TARGETS[1:]))
    torch.testing.assert_close(parts.means(), whole.means())


def test_undefined_targets_give_no_gradient_and_no_nan() -> None:
    raw = _RAW.clone().requires_grad_()
    loss_sums(raw, _TARGETS).weighted(LossWeights().tensor()).backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()
    assert raw.grad[1, 1] == 0
    assert raw.grad[1, 3] == 0
    assert raw.grad[0, 3] == pytest.approx(-0.5)


def test_no_defined_row_is_a_loss_of_zero() -> None:
    sums = loss_sums(_RAW, torch.full_like(_TARGETS, _NAN))
    assert sums.means().tolist() == [0, 0, 0, 0]


def test_members_are_trained_as_if_alone() -> None:
    members = torch.stack([_RAW, _RAW + 1.0])
    alone = [loss_sums(raw, _TARGETS).means() for raw in members]
    torch.testing.assert_close(member_sums(members, _TARGETS).means(), torch.stack(alone))


def test_balanced_consistency_by_hand() -> None:
    targets = torch.full((5, 4), _NAN)
    targets[:4, 3] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    weights = class_weights(targets)
    assert weights.tolist() == pytest.approx([4 / 6, 4 / 2])
    raw = torch.zeros(5, 4)
    raw[0, 3] = math.log(3)  # p = 0.75
    sums = loss_sums(raw, targets, weights)
    assert sums.total[3].item() == pytest.approx(2 * math.log(4 / 3) + 3 * (4 / 6) * math.log(2))
    assert sums.total[:3].tolist() == [0, 0, 0]


def test_soft_targets_are_shares_of_both_classes() -> None:
    soft = torch.tensor([[0.0, 0.0, 0.0, 0.25]])
    raw = torch.tensor([[0.0, 0.0, 0.0, math.log(3)]])
    by_hand = -(0.25 * math.log(0.75) + 0.75 * math.log(0.25))
    assert loss_sums(raw, soft).total[3].item() == pytest.approx(by_hand)
    assert class_weights(soft).tolist() == pytest.approx([1 / 1.5, 1 / 0.5])
    balanced = -(2 * 0.25 * math.log(0.75) + (2 / 3) * 0.75 * math.log(0.25))
    assert loss_sums(raw, soft, class_weights(soft)).total[3].item() == pytest.approx(balanced)


def test_balance_of_equal_classes_changes_nothing() -> None:
    targets = torch.rand(8, 4)
    targets[:, 3] = torch.tensor([0.0, 1.0]).repeat(4)
    raw = torch.randn(8, 4)
    torch.testing.assert_close(loss_sums(raw, targets, class_weights(targets)).total, loss_sums(raw, targets).total)


def test_balance_moves_the_best_constant_to_one_half() -> None:
    targets = torch.full((10, 4), 0.5)
    targets[:, 3] = torch.tensor([1.0] + 9 * [0.0])
    logit = torch.zeros(4, requires_grad=True)
    loss_sums(logit.expand(10, 4), targets, class_weights(targets)).total[3].backward()
    assert logit.grad is not None
    assert logit.grad[3].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, _NAN])
def test_balance_needs_both_classes(value: float) -> None:
    with pytest.raises(ValueError, match=r"consistency_balance is balanced, but of the .* rows"):
        class_weights(torch.full((3, 4), value))


@pytest.mark.parametrize("weights", [{"confidence": -1.0}, dict.fromkeys(["confidence", "progress"], 0.0)])
def test_weights_are_checked(weights: dict[str, float]) -> None:
    if min(weights.values()) == 0:
        weights = {**weights, "remaining": 0.0, "consistency": 0.0}
    with pytest.raises(ValueError, match="loss weights"):
        LossWeights(**weights)

"""Losses by hand: undefined targets count nothing, weights are fixed."""

import math

import pytest
import torch

from ace_learn.heads.losses import LossWeights, loss_sums, member_loss

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
    weights = LossWeights().tensor()
    alone = [loss_sums(raw, _TARGETS).weighted(weights) for raw in members]
    torch.testing.assert_close(member_loss(members, _TARGETS, weights), torch.stack(alone).mean())


@pytest.mark.parametrize("weights", [{"confidence": -1.0}, dict.fromkeys(["confidence", "progress"], 0.0)])
def test_weights_are_checked(weights: dict[str, float]) -> None:
    if min(weights.values()) == 0:
        weights = {**weights, "remaining": 0.0, "consistency": 0.0}
    with pytest.raises(ValueError, match="loss weights"):
        LossWeights(**weights)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.drafts.losses import TokenSums, row_losses, step_weights
from ace_learn.drafts.vocabulary import restrict

KNOWN = torch.ones(1, dtype=torch.bool)


def losses(draft, target):
    """Of one row, from probabilities; the target's may leave something to other tokens."""
    return row_losses(torch.tensor([draft]).log(), torch.tensor([target]).log(), KNOWN)


def test_a_row_by_hand():
    row = losses([0.5, 0.5], [0.5, 0.25])  # a quarter of q is on tokens that cannot be drafted
    assert row.loss.item() == pytest.approx(0.5 * math.log((2 / 3) / 0.5) + 0.25 * math.log((1 / 3) / 0.5))
    assert row.acceptance.item() == pytest.approx(0.75)
    assert row.agreement.item() == 1


def test_the_loss_is_zero_where_the_draft_is_the_target_given_the_vocabulary():
    row = losses([0.8, 0.2], [0.4, 0.1])
    assert row.loss.item() == pytest.approx(0, abs=1e-6)
    assert row.acceptance.item() == pytest.approx(0.5)


def test_the_gradient_is_that_of_the_cross_entropy_to_the_target():
    torch.manual_seed(0)
    logits = torch.randn(5, 6, requires_grad=True)
    target = restrict(torch.randn(5, 9), torch.tensor([0, 1, 3, 4, 7, 8]))
    known = torch.ones(5, dtype=torch.bool)
    (ours,) = torch.autograd.grad(row_losses(logits, target, known).loss.sum(), logits)
    (theirs,) = torch.autograd.grad(-(target.exp() * logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(ours, theirs)


def test_probabilities_that_underflow_give_no_nan():
    logits = torch.zeros(1, 3, requires_grad=True)
    row = row_losses(logits, torch.tensor([[0.0, -torch.inf, -200.0]]), KNOWN)
    row.loss.sum().backward()
    assert row.loss.item() == pytest.approx(math.log(3))
    assert torch.isfinite(logits.grad).all()


def test_agreement_needs_the_most_probable_token_of_all():
    row = row_losses(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.3, 0.1]]).log(), ~KNOWN)
    assert row.agreement.item() == 0


@given(st.integers(0, 10_000))
def test_loss_and_acceptance_keep_their_bounds(seed):
    generator = torch.Generator().manual_seed(seed)
    draft, target = (torch.randn(1, size, generator=generator) * 4 for size in (7, 9))
    log_probs = restrict(target, torch.arange(7))
    row = row_losses(draft, log_probs, KNOWN)
    assert row.loss.item() > -1e-5
    assert 0 <= row.acceptance.item() <= log_probs.exp().sum().item() + 1e-6


def test_steps_by_hand():
    tensors = ([2.0, 9.0, 0.0], [1.5, 0.5, 0.0], [2.0, 1.0, 0.0], [1.5, 0.25, 0.0], [2.0, 1.0, 0.0])
    sums = TokenSums(*map(torch.tensor, tensors))
    weights = step_weights(3, 0.5)
    assert weights.tolist() == [1, 0.5, 0.25]
    assert sums.objective(weights).item() == pytest.approx((1 * 1 + 0.5 * 9) / 1.5)  # the third step has no row
    assert sums.acceptance_length() == pytest.approx(1 + 0.75 + 0.25)
    assert sums.plus(sums).objective(weights).item() == pytest.approx((1 * 1 + 0.5 * 9) / 1.5)

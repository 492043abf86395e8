r"""The token loss of a draft, and what it says about acceptance.

Of a row with target distribution q, restricted to the draft vocabulary D (mass m = sum over D of q, at most 1), and
draft distribution p, the loss is

    L = sum over v in D of q_v (log(q_v / m) - log p_v) = m * KL(q / m || p)

It is 0 where p is q given the draft vocabulary, its gradient is that of the cross-entropy to q, and a row that the
draft vocabulary cannot serve counts little. A draft sampled from p is accepted with probability a = sum min(p, q).

Step j of the unrolled objective counts decay^j (j from 0): L = sum_j decay^j L_j / sum_j decay^j, L_j its mean over
rows. The number of tokens that one verification gives from a row is estimated as 1 + a_0 + a_0 a_1 + ..., the a_j being
those of the target's own text: an estimate, since text whose drafts were accepted is not quite the target's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class TokenSums(NamedTuple):
    """Sums over the rows of each unrolled step, so that means over several batches are exact.

    Attributes:
        loss: Of L.
        acceptance: Of a.
        agreement: Of rows where draft and target have the same most probable token.
        survival: Of a_0 a_1 ... a_j, over the rows that have all of these steps.
        rows: How many rows there are.
    """

    loss: Float[Tensor, " J"]
    acceptance: Float[Tensor, " J"]
    agreement: Float[Tensor, " J"]
    survival: Float[Tensor, " J"]
    rows: Float[Tensor, " J"]

    def plus(self, other: TokenSums) -> TokenSums:
        """The sums over both sets of rows."""
        return TokenSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def objective(self, weights: Float[Tensor, " J"]) -> Float[Tensor, ""]:
        """The weighted mean of the steps' mean losses; steps that no row has are left out."""
        seen = weights * (self.rows > 0)
        return (seen * self.loss / self.rows.clamp_min(1)).sum() / seen.sum().clamp_min(torch.finfo(seen.dtype).tiny)

    def acceptance_length(self) -> float:
        """Estimated tokens of one verification, the bonus token included."""
        return 1 + float((self.survival / self.rows.clamp_min(1)).sum())


class RowLosses(NamedTuple):
    """What each row of one step gives: see `TokenSums`."""

    loss: Float[Tensor, " n"]
    acceptance: Float[Tensor, " n"]
    agreement: Float[Tensor, " n"]


def step_weights(steps: int, decay: float) -> Float[Tensor, " J"]:
    """What each unrolled step counts: 1, decay, decay^2, ..."""
    return torch.tensor([decay**step for step in range(steps)])


def row_losses(
    draft_logits: Float[Tensor, "n Vd"], target_log_probs: Float[Tensor, "n Vd"], top_known: Bool[Tensor, " n"]
) -> RowLosses:
    """Loss, acceptance and agreement of rows; gradients flow into the loss alone.

    Args:
        draft_logits: The draft's logits over its vocabulary.
        target_log_probs: The target's log-probabilities of those tokens (`restrict`).
        top_known: Whether the target's most probable token of all is in the draft vocabulary.
    """
    draft = draft_logits.float().log_softmax(-1)
    target = target_log_probs.exp()
    conditional = target_log_probs - target_log_probs.logsumexp(-1, keepdim=True)
    # A probability that underflows contributes nothing: 0 * -inf would be nan.
    terms = torch.where(target > 0, target * (conditional - draft), torch.zeros_like(draft))
    with torch.no_grad():
        acceptance = torch.minimum(draft.exp(), target).sum(-1)
        agreement = (draft.argmax(-1) == target_log_probs.argmax(-1)) & top_known
    return RowLosses(terms.sum(-1), acceptance, agreement.float())

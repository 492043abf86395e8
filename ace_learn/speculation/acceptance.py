"""Acceptance of drafted tokens: speculative sampling (Leviathan et al. 2023, Chen et al. 2023), batched and ragged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Verified(NamedTuple):
    """Outcome of a verify step before its last token is drawn."""

    num_accepted: Int[Tensor, " B"]
    """Drafts accepted, 0..K."""
    final: Float[Tensor, "B V"]
    """Weights (not normalised) of the token behind the accepted drafts."""


def standard(
    *,
    target: Float[Tensor, "B R V"],
    drafted: Int[Tensor, "B K"],
    num_drafted: Int[Tensor, " B"],
    draft: Float[Tensor, "B K V"] | None,
    accept_noise: Float[Tensor, "B K"],
) -> Verified:
    """Lossless acceptance: a draft n is accepted if u < q_n / p_n; on rejection norm(max(0, q - p)) is sampled.

    Args:
        target: Target probabilities q of every row, R = K + 1 (one-hot rows: greedy, or forced tokens).
        drafted: Drafted tokens.
        num_drafted: Drafts of each request, 0..K; the columns behind are ignored.
        draft: Draft probabilities p, or None for a deterministic drafter (p is one-hot on the draft).
        accept_noise: Uniform draws u.
    """
    batch, width = drafted.shape
    q_n = target[:, :width].gather(-1, drafted[..., None]).squeeze(-1)
    p_n = torch.ones_like(q_n) if draft is None else draft.gather(-1, drafted[..., None]).squeeze(-1)
    proposed = torch.arange(width, device=drafted.device) < num_drafted[:, None]
    accepted = proposed & (accept_noise * p_n < q_n)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)

    row = torch.arange(batch, device=drafted.device)
    final = target[row, num_accepted]
    if width:
        rejected = num_accepted < num_drafted
        column = num_accepted.clamp(max=width - 1)
        one_hot = torch.zeros_like(final).scatter(-1, drafted[row, column, None], 1.0)
        residual = (final - (one_hot if draft is None else draft[row, column])).clamp_min(0.0)
        final = torch.where((rejected & (residual.sum(-1) > 0))[:, None], residual, final)
    return Verified(num_accepted, final)


def emit(verified: Verified, drafted: Int[Tensor, "B K"], noise: Float[Tensor, "B V"]) -> Int[Tensor, "B R"]:
    """The window of each request: its accepted drafts, then one token drawn by Gumbel noise.

    Columns from `num_accepted + 1` on are meaningless.
    """
    last = (verified.final.log() + noise).argmax(dim=-1, keepdim=True)
    return torch.cat((drafted, last), dim=1).scatter(1, verified.num_accepted[:, None], last)

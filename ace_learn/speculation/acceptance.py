"""Acceptance of drafted tokens: speculative sampling (Leviathan et al. 2023, Chen et al. 2023), batched and ragged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Verified(NamedTuple):
    """Outcome of a verify step before its last token is drawn."""

    num_accepted: Int[Tensor, " B"]
    """Drafts accepted, 0..K."""
    final: Float[Tensor, "B V"]
    """Weights (not normalised) of the token behind the accepted drafts."""
    forced: Int[Tensor, " B"]
    """The token that must stand there, or -1."""


class Window(NamedTuple):
    """What a step emits."""

    tokens: Int[Tensor, "B R"]
    """Accepted drafts, then one more token; columns from `num_accepted + 1` on are meaningless."""
    num_accepted: Int[Tensor, " B"]
    """Drafts accepted, 0..K."""


def standard(
    *,
    target: Float[Tensor, "B R V"],
    drafted: Int[Tensor, "B K"],
    num_drafted: Int[Tensor, " B"],
    draft: Float[Tensor, "B K V"] | None,
    accept_noise: Float[Tensor, "B K"],
    forced: Int[Tensor, "B R"] | None = None,
) -> Verified:
    """Lossless acceptance: a draft n is accepted if u < q_n / p_n; on rejection norm(max(0, q - p)) is sampled.

    Args:
        target: Target probabilities q of every row, R = K + 1.
        drafted: Drafted tokens.
        num_drafted: Drafts of each request, 0..K; the columns behind are ignored.
        draft: Draft probabilities p, or None for a deterministic drafter (p is one-hot on the draft).
        accept_noise: Uniform draws u.
        forced: Token that must follow each row, or -1. Such a row has the one-hot on it for q, so that a draft is
            accepted there if it is this token.
    """
    batch, width = drafted.shape
    q_n = target[:, :width].gather(-1, drafted[..., None]).squeeze(-1)
    p_n = torch.ones_like(q_n) if draft is None else draft.gather(-1, drafted[..., None]).squeeze(-1)
    if forced is None:
        forced = torch.full(target.shape[:2], -1, device=drafted.device)
    fits = torch.where(forced[:, :width] >= 0, drafted == forced[:, :width], accept_noise * p_n < q_n)
    num_accepted = _leading(fits, num_drafted)

    row = torch.arange(batch, device=drafted.device)
    final = target[row, num_accepted]
    if width:
        rejected = num_accepted < num_drafted
        column = num_accepted.clamp(max=width - 1)
        if draft is None:
            residual = final.scatter(-1, drafted[row, column, None], 0.0)
        else:
            residual = (final - draft[row, column]).clamp_min(0.0)
        final = torch.where((rejected & (residual.sum(-1) > 0))[:, None], residual, final)
    return Verified(num_accepted, final, forced[row, num_accepted])


def emit(verified: Verified, drafted: Int[Tensor, "B K"], noise: Float[Tensor, "B V"]) -> Window:
    """The window of each request: its accepted drafts, then one token, forced or drawn by Gumbel noise."""
    drawn = (verified.final.log() + noise).argmax(dim=-1)
    last = torch.where(verified.forced >= 0, verified.forced, drawn)
    return _window(drafted, verified.num_accepted, last)


def follow(choice: Int[Tensor, "B R"], drafted: Int[Tensor, "B K"], num_drafted: Int[Tensor, " B"]) -> Window:
    """The window where every row has one possible token (greedy, or forced): drafts are accepted while they are it."""
    num_accepted = _leading(drafted == choice[:, :-1], num_drafted)
    return _window(drafted, num_accepted, choice.gather(1, num_accepted[:, None])[:, 0])


def _leading(fits: Bool[Tensor, "B K"], num_drafted: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """How many drafts from the first on are accepted."""
    proposed = torch.arange(fits.shape[1], device=fits.device) < num_drafted[:, None]
    return (proposed & fits).long().cumprod(dim=1).sum(dim=1)


def _window(drafted: Int[Tensor, "B K"], num_accepted: Int[Tensor, " B"], last: Int[Tensor, " B"]) -> Window:
    tokens = torch.cat((drafted, last[:, None]), dim=1).scatter(1, num_accepted[:, None], last[:, None])
    return Window(tokens, num_accepted)

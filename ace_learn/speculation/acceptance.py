"""Acceptance of drafted tokens: one rejection sampler for every rule of `speculation.rules`, batched and ragged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.speculation.rules import AcceptanceConfig, raise_row, raised, raised_kl, typical_threshold


class Verified(NamedTuple):
    """Outcome of a verify step before its last token is drawn."""

    num_accepted: Int[Tensor, " B"]
    """Drafts accepted, 0..K."""
    final: Float[Tensor, "B V"]
    """Weights (not normalised) of the token behind the accepted drafts."""
    forced: Int[Tensor, " B"]
    """The token that must stand there, or -1."""
    kl: Float[Tensor, " B"]
    """What a lossy rule spent: KL(h||q) given the drafts, summed over the rows that were decided, nats."""


class Window(NamedTuple):
    """What a step emits."""

    tokens: Int[Tensor, "B R"]
    """Accepted drafts, then one more token; columns from `num_accepted + 1` on are meaningless."""
    num_accepted: Int[Tensor, " B"]
    """Drafts accepted, 0..K."""
    kl: Float[Tensor, " B"]
    """KL(h||q) given the drafts, summed over the rows that were decided, nats; 0 for a lossless rule."""


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
    return verify(
        AcceptanceConfig(),
        target=target,
        drafted=drafted,
        num_drafted=num_drafted,
        draft=draft,
        accept_noise=accept_noise,
        forced=forced,
    )


def verify(
    config: AcceptanceConfig,
    *,
    target: Float[Tensor, "B R V"],
    drafted: Int[Tensor, "B K"],
    num_drafted: Int[Tensor, " B"],
    draft: Float[Tensor, "B K V"] | None,
    accept_noise: Float[Tensor, "B K"],
    forced: Int[Tensor, "B R"] | None = None,
    relaxed: Bool[Tensor, "B K"] | None = None,
) -> Verified:
    """Acceptance under any rule: n is accepted if u < h_n / p_n; on rejection norm(max(0, h - p)) is sampled.

    `standard` has h = q, Cactus raises h_n (`rules.cactus_target`); only the row of a rejection needs all of h.
    `typical` accepts n by q_n alone and replaces a rejected draft by the most probable token. A forced row bypasses
    every rule, and the row behind the last draft keeps q.

    Args:
        config: The rule.
        target: Target probabilities q of every row, R = K + 1.
        drafted: Drafted tokens.
        num_drafted: Drafts of each request, 0..K; the columns behind are ignored.
        draft: Draft probabilities p, or None for a deterministic drafter (p is one-hot on the draft).
        accept_noise: Uniform draws u.
        forced: Token that must follow each row, or -1.
        relaxed: Rows that a lossy rule applies to; the others have `standard`. None: all.
    """
    batch, width = drafted.shape
    q_n = target[:, :width].gather(-1, drafted[..., None]).squeeze(-1)
    p_n = torch.ones_like(q_n) if draft is None else draft.gather(-1, drafted[..., None]).squeeze(-1)
    if forced is None:
        forced = torch.full(target.shape[:2], -1, device=drafted.device)
    free = forced[:, :width] < 0
    lossy = free if relaxed is None else free & relaxed
    judged = _judge(config, target[:, :width], q_n, p_n, accept_noise, lossy)
    num_accepted = _leading(torch.where(free, judged.fits, drafted == forced[:, :width]), num_drafted)

    row, column = torch.arange(batch, device=drafted.device), torch.arange(width, device=drafted.device)
    final = target[row, num_accepted]
    kl = torch.zeros(batch, dtype=judged.kl.dtype, device=drafted.device)
    if width:
        decided = (column <= num_accepted[:, None]) & (column < num_drafted[:, None])
        kl = torch.where(decided & lossy, judged.kl, 0.0).sum(-1)
        at = num_accepted.clamp(max=width - 1)
        law = final if config.rule == "standard" else raise_row(final, drafted[row, at], judged.g[row, at])
        if draft is None:
            residual = law.scatter(-1, drafted[row, at, None], 0.0)
        else:
            residual = (law - draft[row, at]).clamp_min(0.0)
        if config.rule == "typical":
            mode = torch.zeros_like(final).scatter(-1, final.argmax(-1, keepdim=True), 1.0)
            residual = torch.where(lossy[row, at, None], mode, residual)
        rejected = num_accepted < num_drafted
        final = torch.where((rejected & (residual.sum(-1) > 0))[:, None], residual, final)
    return Verified(num_accepted, final, forced[row, num_accepted], kl)


class _Judged(NamedTuple):
    """The drafts of free rows, each by itself."""

    fits: Bool[Tensor, "B K"]
    g: Float[Tensor, "B K"]
    """h_n."""
    kl: Float[Tensor, "B K"]
    """KL(h||q) given the draft, where the rule is a lossy one."""


def _judge(
    config: AcceptanceConfig,
    target: Float[Tensor, "B K V"],
    q_n: Float[Tensor, "B K"],
    p_n: Float[Tensor, "B K"],
    noise: Float[Tensor, "B K"],
    lossy: Bool[Tensor, "B K"],
) -> _Judged:
    """Applies the rule to `lossy` rows, and `standard` to the others."""
    if config.rule == "standard":
        return _Judged(noise * p_n < q_n, q_n, torch.zeros_like(q_n))
    if config.rule == "typical":
        rows = target.unbind(1)  # small temporaries
        floor = [typical_threshold(row, *config.thresholds) for row in rows]
        bound = torch.stack(floor, dim=1) if floor else torch.zeros_like(q_n)
        fits = torch.where(lossy, q_n > bound, noise * p_n < q_n)
        mode = torch.stack([row.amax(-1) for row in rows], dim=1) if floor else q_n
        return _Judged(fits, q_n, -torch.where(fits, q_n, mode).clamp_min(1e-38).log())
    assert config.delta is not None, "AcceptanceConfig sees to it"
    g = torch.where(lossy, raised(q_n, config.delta, exact=config.rule == "cactus_exact"), q_n.double())
    return _Judged(noise * p_n < g, g, raised_kl(g, q_n))


def emit(verified: Verified, drafted: Int[Tensor, "B K"], noise: Float[Tensor, "B V"]) -> Window:
    """The window of each request: its accepted drafts, then one token, forced or drawn by Gumbel noise."""
    drawn = (verified.final.log() + noise).argmax(dim=-1)
    last = torch.where(verified.forced >= 0, verified.forced, drawn)
    return _window(drafted, verified.num_accepted, last, verified.kl)


def follow(choice: Int[Tensor, "B R"], drafted: Int[Tensor, "B K"], num_drafted: Int[Tensor, " B"]) -> Window:
    """The window where every row has one possible token (greedy, or forced): drafts are accepted while they are it."""
    num_accepted = _leading(drafted == choice[:, :-1], num_drafted)
    nothing = torch.zeros(len(choice), device=choice.device)
    return _window(drafted, num_accepted, choice.gather(1, num_accepted[:, None])[:, 0], nothing)


def _leading(fits: Bool[Tensor, "B K"], num_drafted: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """How many drafts from the first on are accepted."""
    proposed = torch.arange(fits.shape[1], device=fits.device) < num_drafted[:, None]
    return (proposed & fits).long().cumprod(dim=1).sum(dim=1)


def _window(
    drafted: Int[Tensor, "B K"], num_accepted: Int[Tensor, " B"], last: Int[Tensor, " B"], kl: Float[Tensor, " B"]
) -> Window:
    tokens = torch.cat((drafted, last[:, None]), dim=1).scatter(1, num_accepted[:, None], last[:, None])
    return Window(tokens, num_accepted, kl)

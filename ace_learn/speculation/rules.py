"""Acceptance rules: which law h takes the place of the target's q where a draft is verified.

Speculative sampling accepts a draft n with min(1, h_n / p_n) and replaces a rejected one by norm(max(0, h - p)). With
h = q that is lossless (Leviathan et al. 2023, Chen et al. 2023). Cactus (ICLR 2026, arXiv 2604.04987) raises h_n above
q_n within a budget on KL(h||q); typical acceptance (Medusa, Cai et al. 2024) takes what is probable enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

AcceptanceRule = Literal["standard", "typical", "cactus", "cactus_exact"]

TYPICAL_EPSILON = 0.09
"""Medusa's threshold, that of vLLM's V0 engine too; both take its square root for `alpha`."""
_NEWTON_STEPS = 8
"""Two more than `raised` needs for double precision: tried down to q_n and 1 - q_n = 1e-13, delta from 1e-12 to 10."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """When a drafted token is accepted."""

    rule: AcceptanceRule = "standard"
    """`standard` (lossless), `typical`, `cactus` (closed form) or `cactus_exact` (keeps its budget): the last three
    trade fidelity for longer windows, and do nothing at temperature 0."""
    delta: float | None = None
    """cactus, cactus_exact: budget on KL(h||q) of a verified row, nats; published values are 0.75 and 1."""
    epsilon: float | None = None
    """typical: a draft of at least this probability is accepted; none: 0.09."""
    alpha: float | None = None
    """typical: so is one of at least alpha * exp(-entropy); none: the square root of epsilon."""
    only_in_think: bool = False
    """Apply the rule to thought tokens alone, and `standard` to the answer."""

    def __post_init__(self) -> None:
        """Checks the values, and refuses what would be ignored."""
        if self.rule not in get_args(AcceptanceRule):
            raise ValueError(f"unknown acceptance rule {self.rule!r}; known: {', '.join(get_args(AcceptanceRule))}")
        read = {"typical": ("epsilon", "alpha"), "cactus": ("delta",), "cactus_exact": ("delta",)}.get(self.rule, ())
        ignored = [n for n in ("delta", "epsilon", "alpha") if n not in read and getattr(self, n) is not None]
        if self.only_in_think and self.rule == "standard":
            ignored.append("only_in_think")
        if ignored:
            raise ValueError(f"the rule {self.rule} ignores {', '.join(ignored)}; leave it out or choose another rule")
        if "delta" in read and (self.delta is None or not 0.0 <= self.delta < math.inf):
            raise ValueError(f"the rule {self.rule} needs a delta >= 0 (nats; published: 0.75 and 1), not {self.delta}")
        if self.epsilon is not None and not 0.0 < self.epsilon <= 1.0:
            raise ValueError(f"epsilon is a probability, 0 < epsilon <= 1, not {self.epsilon}")
        if self.alpha is not None and not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be > 0, not {self.alpha}")

    @property
    def is_lossless(self) -> bool:
        """Whether the output has the target's law."""
        return self.rule == "standard"

    @property
    def thresholds(self) -> tuple[float, float]:
        """Epsilon and alpha of `typical`, with their defaults."""
        epsilon = TYPICAL_EPSILON if self.epsilon is None else self.epsilon
        return epsilon, math.sqrt(epsilon) if self.alpha is None else self.alpha


def raised(q_n: Float[Tensor, "*rows"], delta: float, *, exact: bool) -> Float[Tensor, "*rows"]:
    """The probability g >= q_n that Cactus gives to the drafted token.

    The closed form is g = min(1, q_n + sqrt(2 delta q_n (1 - q_n))) (Corollary 5). It keeps KL(h||q) <= delta only
    while g <= 0.5: at q_n = 1/(1 + 2 delta) it gives 1, at a KL of ln(1 + 2 delta). The exact g solves
    g ln(g/q_n) + (1 - g) ln((1 - g)/(1 - q_n)) = delta, or is 1 where even that costs at most delta.

    The equation's left side is convex and rising in g, so that Newton's method from a point above the root falls
    towards it; three bounds give that point for small, middle and large q_n. There is no host sync, and an eighth of
    the kernels that bisection to the same precision takes.

    Args:
        q_n: Target probability of the drafted token; 0 stays 0, and 1 stays 1.
        delta: Budget, nats.
        exact: Solve the equation instead of its second-order expansion.

    Returns:
        g, in double precision.
    """
    q = q_n.double()
    if not exact:
        return (q + (2.0 * delta * q * (1.0 - q)).sqrt()).clamp_max(1.0)
    inside = q.clamp(1e-300, 1.0 - 2.0**-53)  # 0 and 1 have nothing to solve
    other = 1.0 - inside
    small = inside + delta + (delta * delta + 2.0 * delta * inside).sqrt()  # KL >= (g - q)^2 / 2g
    middle = inside + math.sqrt(delta / 2.0)  # KL >= 2 (g - q)^2
    large = inside + (2.0 * delta * other).sqrt()  # KL >= (g - q)^2 / 2(1 - q)
    g = torch.minimum(torch.minimum(small, middle), large).clamp_max(1.0 - 2.0**-53)
    for _ in range(_NEWTON_STEPS):
        slope = (g / inside).log() - ((1.0 - g) / other).log()
        excess = (_binary_kl(g, inside) - delta).clamp_min(0.0)
        g = torch.maximum(g - torch.where(slope > 0.0, excess / slope.clamp_min(1e-300), 0.0), inside)
    g = torch.where(-inside.log() <= delta, 1.0, g)
    return torch.where((q > 0.0) & (q < 1.0), g, q)


def _binary_kl(g: Float[Tensor, "*rows"], q: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """KL between two coins, nats; infinite where g is positive and q is 0."""
    return torch.xlogy(g, g / q) + torch.xlogy(1.0 - g, (1.0 - g) / (1.0 - q))


def raised_kl(g: Float[Tensor, "*rows"], q_n: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """KL(h||q) of Cactus' h, nats: the others keep their proportions, so that it is that of two coins."""
    q = q_n.double()
    spread = _binary_kl(g.double(), q.clamp(1e-300, 1.0 - 2.0**-53))
    return torch.where((q > 0.0) & (q < 1.0), spread.clamp_min(0.0), 0.0)


def raise_row(
    q: Float[Tensor, "*rows V"], drafted: Int[Tensor, "*rows"], g: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows V"]:
    """The law h with h_n = g, the others scaled alike; q itself where the others have no mass."""
    q_n = q.gather(-1, drafted[..., None]).squeeze(-1).double()
    others = torch.where(q_n < 1.0, (1.0 - g.double()) / (1.0 - q_n).clamp_min(1e-300), 1.0)
    return (q * others[..., None].to(q.dtype)).scatter(-1, drafted[..., None], g[..., None].to(q.dtype))


def cactus_target(
    q: Float[Tensor, "*rows V"], drafted: Int[Tensor, "*rows"], delta: float, exact: bool
) -> Float[Tensor, "*rows V"]:
    """Cactus' law h for rows whose drafted token is known: h_n = g, h_i = q_i (1 - g) / (1 - q_n).

    Fed to a rejection sampler in place of q, in every row but the bonus row. Batched, without host sync.

    Args:
        q: Target probabilities, after temperature and truncation.
        drafted: The drafted token of each row.
        delta: Budget on KL(h||q), nats.
        exact: `cactus_exact` instead of the closed form `cactus`; see `raised`.

    Returns:
        h, in the dtype of q.
    """
    q_n = q.gather(-1, drafted[..., None]).squeeze(-1)
    return raise_row(q, drafted, raised(q_n, delta, exact=exact))


def typical_threshold(q: Float[Tensor, "*rows V"], epsilon: float, alpha: float) -> Float[Tensor, "*rows"]:
    """What q_n must exceed for typical acceptance: min(epsilon, alpha exp(-entropy(q)))."""
    entropy = -torch.xlogy(q, q).sum(-1)
    return (alpha * (-entropy).exp()).clamp_max(epsilon)


def kl_divergence(h: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """KL(h||q) in nats, in double precision; infinite where h is positive and q is 0."""
    h, q = h.double(), q.double()
    return torch.where(h > 0.0, torch.xlogy(h, h / q), 0.0).sum(-1)


def output_law(
    q: Float[Tensor, "*rows V"], p: Float[Tensor, "*rows V"], config: AcceptanceConfig
) -> Float[Tensor, "*rows V"]:
    """The exact law of the token that a verified row emits, by enumeration of the drafted token.

    `KL(h||q) <= delta` bounds h for a given draft; what is emitted mixes the laws of all drafts, and only this says how
    far that is from q. It costs V^2 per row: for tests and studies.

    Args:
        q: Target probabilities.
        p: Draft probabilities; each draft n is drawn from them.
        config: The rule.
    """
    q, p = q.double(), p.double()
    size = q.shape[-1]
    every = torch.arange(size, device=q.device).expand(q.shape)
    if config.rule == "typical":
        accepted = (q > typical_threshold(q, *config.thresholds)[..., None]).double()
        mode = torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0)
        return p * accepted + (p * (1.0 - accepted)).sum(-1, keepdim=True) * mode
    by_draft = q[..., None, :].expand(*q.shape, size)  # row n: the law when n was drafted
    if config.rule != "standard":
        assert config.delta is not None
        by_draft = cactus_target(by_draft, every, config.delta, config.rule == "cactus_exact")
    h_n = by_draft.diagonal(dim1=-2, dim2=-1)
    accepted = torch.where(p > 0.0, h_n / p, 1.0).clamp_max(1.0)
    residual = (by_draft - p[..., None, :]).clamp_min(0.0)
    residual = residual / residual.sum(-1, keepdim=True).clamp_min(1e-300)
    rejected = p * (1.0 - accepted)
    return p * accepted + (rejected[..., None] * residual).sum(-2)

"""Two numbers of each row of logits, at the cost of little more than a softmax."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SMALLEST = -1e4
"""In place of minus infinity, whose product with probability 0 would be NaN."""
_AT_ONCE = {"cpu": 2**19}
"""Numbers that are worked on together: what fits a processor's cache, or 256 MB on other devices."""
_SMALL = 2**15
"""Numbers up to which passes over them cost less than further calls."""
_LIKELY = 1024
"""Columns among which a token is looked for that is not too unlikely."""


def logit_statistics(
    logits: Float[Tensor, "R V"], chosen: Int[Tensor, " N"] | None = None
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-sum-exp and entropy (nats) of rows, in float32.

    Any token's logit less its log-probability is the log-sum-exp; the entropy is that less the mean logit.

    Args:
        logits: Raw logits.
        chosen: Which rows; None: all.
    """
    if torch.compiler.is_compiling():
        return fused((logits if chosen is None else logits[chosen]).float())
    size = max(1, _AT_ONCE.get(logits.device.type, 2**26) // logits.shape[1])
    in_cache = logits.device.type == "cpu" and logits.numel() > _SMALL
    statistics = _on_cpu if in_cache else on_device
    parts = [
        statistics((part if chosen is None else logits[part]).float())
        for part in (logits if chosen is None else chosen).split(size)
    ]
    totals, entropies = zip(*parts, strict=True)
    return torch.cat(totals), torch.cat(entropies)


def on_device(rows: Float[Tensor, "n V"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The statistics without a look at any result."""
    probabilities = rows.softmax(-1)
    totals = rows.amax(-1) - probabilities.amax(-1).log()
    return totals, totals - (probabilities * rows.clamp_min(_SMALLEST)).sum(-1)


def fused(rows: Float[Tensor, "n V"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The same for a compiler, which makes two passes of it; a softmax would cost a third, and its exponentials."""
    most = rows.amax(-1)
    weights = (rows - most[:, None]).exp()
    total = weights.sum(-1)
    totals = most + total.log()
    return totals, totals - (weights * rows.clamp_min(_SMALLEST)).sum(-1) / total


def _on_cpu(rows: Float[Tensor, "n V"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The same in less passes, as long as the results show that this was right."""
    probabilities = rows.softmax(-1)
    likely = probabilities[:, :_LIKELY].amax(-1)
    totals = rows[:, :_LIKELY].amax(-1) - likely.log()
    means = torch.stack([torch.dot(*pair) for pair in zip(probabilities.unbind(), rows.unbind(), strict=True)])
    if bool((likely > torch.finfo(torch.float32).tiny).all() & means.isfinite().all()):
        return totals, totals - means
    return on_device(rows)

"""From logits to the distribution that is sampled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the noise is counter-based (`ace_learn.speculation.noise`)."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if (
            not (self.temperature == 0.0 or 1e-6 <= self.temperature < 100.0)
            or self.top_k < 0
            or not 0.0 < self.top_p <= 1.0
        ):
            raise ValueError(
                "need temperature 0 (greedy) or 1e-6 <= temperature < 100, top_k >= 0 and 0 < top_p <= 1, not "
                f"{self.temperature}, {self.top_k} and {self.top_p}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"the seed must fit into 64 bits, not {self.seed}")

    @classmethod
    def from_json(cls, data: Mapping[str, JSON]) -> Sampling:
        """Reads the sampling that a data set records.

        Raises:
            ValueError: A field is missing or no number.
        """
        fields = JsonFields.of(dict(data), where="sampling")
        return cls(
            temperature=fields.number("temperature"),
            top_k=fields.integer("top_k"),
            top_p=fields.number("top_p"),
            seed=fields.integer("seed"),
        )

    def probabilities(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """The distribution to draw from; one-hot on the largest logit when greedy (the first, on a tie)."""
        if self.temperature == 0.0:
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        scaled = logits / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            bound = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < bound, -torch.inf)
        probabilities = scaled.softmax(-1)
        return probabilities if self.top_p == 1.0 else _nucleus(probabilities, self.top_p)


def _nucleus(probabilities: Float[Tensor, "*rows V"], top_p: float) -> Float[Tensor, "*rows V"]:
    """Keeps the smallest most-probable set that reaches `top_p` (Holtzman et al. 2020)."""
    ordered, index = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # mass before the token already suffices
    kept = torch.zeros_like(probabilities).scatter(-1, index, ordered.masked_fill(outside, 0.0))
    return kept / kept.sum(-1, keepdim=True)

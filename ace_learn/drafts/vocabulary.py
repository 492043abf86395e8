"""The draft vocabulary: the tokens that a draft module can propose, by how often the target says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ace_learn.drafts.data import Trace


class DraftVocabulary(NamedTuple):
    """The tokens that a draft module can propose.

    Attributes:
        target_ids: Their ids in the target's vocabulary, ascending.
        coverage: Share of the output tokens that it was chosen by which are in it.
    """

    target_ids: Int64[Tensor, " Vd"]
    coverage: float

    @property
    def offsets(self) -> Int64[Tensor, " Vd"]:
        """Target id minus draft id, which is what checkpoints call d2t."""
        return self.target_ids - torch.arange(len(self.target_ids))


def token_counts(traces: Sequence[Trace], vocab_size: int) -> Int64[Tensor, " V"]:
    """How often each token stands in the outputs."""
    outputs = torch.cat([trace.tokens[trace.prompt_length :] for trace in traces])
    return torch.bincount(outputs, minlength=vocab_size)


def choose_vocabulary(counts: Int64[Tensor, " V"], size: int, *, always: Sequence[int] = ()) -> DraftVocabulary:
    """The most frequent tokens, of equally frequent ones those with smaller ids.

    Args:
        counts: How often each token of the target's vocabulary was said.
        size: How many tokens are wanted.
        always: Tokens that are in it however rare they are, such as the think end and stop tokens.

    Raises:
        ValueError: The size is not from the number of `always` to that of the target's vocabulary.
    """
    wanted = sorted(set(always))
    if not max(1, len(wanted)) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} tokens is impossible: the target has {len(counts)}, and {len(wanted)} "
            "(think end, stop tokens) must be in it; choose another shape.vocab_size"
        )
    ranked = counts.clone()
    ranked[wanted] = torch.iinfo(counts.dtype).max
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return DraftVocabulary(chosen, float(counts[chosen].sum() / counts.sum().clamp_min(1)))


def restrict(logits: Float[Tensor, "*rows V"], target_ids: Int64[Tensor, " Vd"]) -> Float[Tensor, "*rows Vd"]:
    """The target's log-probabilities of the draft vocabulary; their exponentials sum to its mass, at most 1."""
    return logits.float().log_softmax(-1)[..., target_ids]

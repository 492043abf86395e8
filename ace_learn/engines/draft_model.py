"""Drafting with a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.engines.sampling import Sampling
from ace_learn.models.catch_up import catch_up
from ace_learn.models.target import Target
from ace_learn.speculation.drafters import Drafts, DraftStates
from ace_learn.speculation.noise import Stream, gumbel


class ModelDrafter:
    """Any causal language model with the target's tokenizer, decoding ahead of it.

    It draws its tokens under the target's own temperature and truncation, with noise of its own keyed by (seed,
    request, position), so that a draft depends neither on the batch nor on what was accepted.
    """

    def __init__(self, model: Target, *, sampling: Sampling, vocab_size: int) -> None:
        """Wraps a draft model.

        Args:
            model: The draft model (`load_draft_model`).
            sampling: That of the engine.
            vocab_size: Size of the target's output layer.
        """
        self.model, self.sampling, self.vocab_size = model, sampling, vocab_size
        self.taps: tuple[int, ...] = ()
        self.states: DraftStates | None = None

    def start(self, keys: Int[Tensor, " B"]) -> _ModelSession:
        """An empty cache for the requests of a batch."""
        return _ModelSession(self, keys)

    def draw(
        self, logits: Float[Tensor, "B W"], keys: Int[Tensor, " B"], position: Int[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
        """One draft of each request for a position, and the distribution that it was drawn from (None if greedy)."""
        missing = self.vocab_size - logits.shape[1]
        fitted = logits[:, : self.vocab_size] if missing <= 0 else _pad(logits, missing)
        return draw_draft(self.sampling, fitted, keys, position)


def draw_draft(
    sampling: Sampling, logits: Float[Tensor, "B V"], keys: Int[Tensor, " B"], position: Int[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
    """Draws a draft for a position under the target's own sampling, with noise of its own; the law is None if greedy.

    Args:
        sampling: That of the engine.
        logits: The drafter's, over the target's vocabulary.
        keys: Key of each request.
        position: Sequence position that each draw decides.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1), None
    law = sampling.probabilities(logits)
    noise = gumbel(
        seed=sampling.seed, request=keys, position=position[:, None], size=logits.shape[-1], stream=Stream.DRAFT
    )
    return (law.log() + noise[:, 0]).argmax(-1), law


def _pad(logits: Float[Tensor, "B W"], missing: int) -> Float[Tensor, "B V"]:
    """Tokens that the draft model has no output for are never drafted."""
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class _Held(NamedTuple):
    """What the draft model's cache holds of a request."""

    length: int
    """Positions from 0 on whose tokens were those of the request already."""
    drafts: list[int]
    """Tokens at the positions behind them: drafts, which the target may have replaced."""

    def agreeing(self, ids: Sequence[int]) -> int:
        """Positions from 0 on that hold the request's tokens, its newest one excepted: that one must be run."""
        newest = len(ids) - 1
        position = self.length
        while position < newest and position - self.length < len(self.drafts):
            if ids[position] != self.drafts[position - self.length]:
                break
            position += 1
        return min(position, newest)


class _ModelSession:
    """The draft model's cache for one batch."""

    def __init__(self, drafter: ModelDrafter, keys: Int[Tensor, " B"]) -> None:
        self.drafter, self.model = drafter, drafter.model
        self.cache = self.model.new_cache(len(keys))
        self.keys = keys.clone()
        self.held = [_Held(0, []) for _ in range(len(keys))]

    def observe(
        self,
        positions: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q A"],
        *,
        longest: int,
        first_slot: int = 0,
    ) -> None:
        """Nothing is read of the target."""

    @torch.inference_mode()
    def draft(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Drafts:
        """Catches up with the requests' tokens and decodes; see `DraftSession`."""
        lengths = [len(ids) for ids in sequences]
        counts = [max(0, min(n, self.model.context_length - length)) for n, length in zip(room, lengths, strict=True)]
        if not any(counts):
            return Drafts.none(len(sequences), self.keys.device)
        end = torch.tensor(lengths, device=self.keys.device)
        logits = self._catch_up(sequences, lengths)
        drawn = [self._draw(logits, end)]
        for ahead in range(1, max(counts)):
            tokens = drawn[-1][0].clamp_max(self.model.vocab_size - 1)[:, None]
            place = end[:, None] + ahead - 1
            outputs = self.model.forward(tokens, place, self.cache, longest=max(lengths) + ahead, last_only=True)
            drawn.append(self._draw(outputs.logits[:, -1], end + ahead))
        tokens = torch.stack([token for token, _ in drawn], dim=1)
        for slot, drafts in enumerate(tokens[:, :-1].tolist()):
            self.held[slot] = _Held(lengths[slot], drafts)
        laws = [law for _, law in drawn if law is not None]
        return Drafts(tokens, torch.tensor(counts, device=end.device), torch.stack(laws, dim=1) if laws else None)

    def swap(self, a: int, b: int) -> None:
        """Exchanges two slots."""
        self.cache.swap(a, b)
        self.keys[[a, b]] = self.keys[[b, a]]
        self.held[a], self.held[b] = self.held[b], self.held[a]

    def _catch_up(self, sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> Float[Tensor, "B W"]:
        running = self.held[: len(sequences)]
        known = [held.agreeing(ids) for held, ids in zip(running, sequences, strict=True)]
        largest = self.model.vocab_size - 1  # a smaller padding of the vocabulary
        feeds = [[min(token, largest) for token in ids[n:]] for n, ids in zip(known, sequences, strict=True)]
        return catch_up(self.model, self.cache, feeds, lengths)

    def _draw(
        self, logits: Float[Tensor, "B W"], position: Int[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
        return self.drafter.draw(logits, self.keys[: len(logits)], position)

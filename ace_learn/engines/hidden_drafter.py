"""Drafting with a module that reads the target's hidden states: EAGLE-3 or MTP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.engines.draft_model import draw_draft
from ace_learn.engines.sampling import Sampling
from ace_learn.models.cache import grown_capacity
from ace_learn.models.catch_up import Piece, pieces
from ace_learn.models.draft_layers import DraftOutput
from ace_learn.models.draft_module import Draft
from ace_learn.models.target import Target
from ace_learn.speculation.drafters import Drafts, DraftStates


class HiddenDrafter:
    """Decodes ahead from the target's own hidden states.

    It draws its tokens under the target's temperature and truncation, over the target's vocabulary, with noise of its
    own keyed by (seed, request, position), so that a draft depends neither on the batch nor on what was accepted.
    """

    def __init__(
        self,
        module: Draft,
        target: Target,
        *,
        sampling: Sampling,
        states: DraftStates | None = None,
    ) -> None:
        """Wraps a draft module (`load_draft`).

        Args:
            module: EAGLE-3 or MTP.
            target: The model that verifies.
            sampling: That of the engine.
            states: The hidden states that signals read; then up to `states.delay` - 1 tokens can be drafted. None: no
                signal reads any.
        """
        self.module, self.sampling, self.states = module, sampling, states
        self.taps = module.taps(target.identity.num_layers)

    def start(self, keys: Int[Tensor, " B"]) -> _HiddenSession:
        """Empty caches for the requests of a batch."""
        return _HiddenSession(self, keys)

    def law(self, states: Float[Tensor, "B R H"]) -> Float[Tensor, "B R V"]:
        """What it draws the token behind each of its states from, over the target's vocabulary."""
        return self.sampling.probabilities(self.module.full_logits(states))


class _HiddenSession:
    """The draft's cache for one batch, and what the target has said, by position.

    Row p of the draft reads the target's hidden state of p and token p + 1. Its keys are final once both were verified;
    what it drafted further, from its own states, is run again when the target has spoken.
    """

    def __init__(self, drafter: HiddenDrafter, keys: Int[Tensor, " B"]) -> None:
        self.drafter, self.module = drafter, drafter.module
        self.keys = keys.clone()
        self.cache = self.module.new_cache(len(keys))
        self.final = [0] * len(keys)
        """Rows of each slot whose keys are final."""
        size, like = self.module.config.block.hidden_size, next(self.module.parameters())
        self.hidden = like.new_zeros(len(keys), 0, size)
        delay = 0 if drafter.states is None else drafter.states.delay
        self.states = like.new_zeros(len(keys), delay, size)
        """The newest states over verified tokens, in order; zeros before the first position."""

    @torch.inference_mode()
    def observe(
        self,
        positions: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q A"],
        *,
        longest: int,
        first_slot: int = 0,
    ) -> None:
        """Keeps what the draft reads of the target's hidden states."""
        if longest > self.hidden.shape[1]:
            extra = grown_capacity(self.hidden.shape[1], longest) - self.hidden.shape[1]
            self.hidden = torch.nn.functional.pad(self.hidden, (0, 0, 0, extra))
        rows = first_slot + torch.arange(len(positions), device=positions.device)[:, None]
        self.hidden[rows, positions] = self.module.fuse(hidden)

    @torch.inference_mode()
    def draft(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Drafts:
        """Catches up with the requests' tokens and decodes; see `DraftSession`."""
        most, active, device = max(room), len(sequences), self.keys.device
        if not most and self.drafter.states is None:
            return Drafts.none(active, device)
        out = self._catch_up(sequences)
        states = None if self.drafter.states is None else self.states[:active].clone()
        if not most:
            return Drafts.none(active, device)._replace(states=states)
        longest = max(map(len, sequences))
        end = torch.tensor([len(ids) for ids in sequences], device=device)
        drawn = [self._draw(out, end)]
        for ahead in range(1, most):
            place = (end - 2 + ahead)[:, None]
            out = self.module.decode(
                drawn[-1][0][:, None], out.fed_back[:, -1:], place, self.cache, longest=longest - 1 + ahead
            )
            drawn.append(self._draw(out, end + ahead))
        laws = [law for _, law in drawn if law is not None]
        return Drafts(
            tokens=torch.stack([token for token, _ in drawn], dim=1),
            num_drafted=torch.tensor(room, device=device),
            probabilities=torch.stack(laws, dim=1) if laws else None,
            states=states,
        )

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchanges two slots."""
        self.cache.swap(a, b)
        for kept in (self.keys, self.hidden, self.states):
            kept[[a, b]] = kept[[b, a]]
        self.final[a], self.final[b] = self.final[b], self.final[a]

    def _catch_up(self, sequences: Sequence[Sequence[int]]) -> DraftOutput:
        """Runs every row whose token and hidden state are verified; returns the newest of each sequence."""
        feeds = [ids[done + 1 :] for ids, done in zip(sequences, self.final, strict=False)]
        newest = []
        for piece in pieces(feeds, [len(ids) - 1 for ids in sequences], self.keys.device):
            rows = piece.first_slot + torch.arange(len(piece.tokens), device=self.keys.device)[:, None]
            read = self.hidden[rows, piece.positions.clamp_max(self.hidden.shape[1] - 1)]
            out = self.module.decode(
                piece.tokens, read, piece.positions, self.cache, longest=piece.longest, first_slot=piece.first_slot
            )
            if self.drafter.states is not None:
                self._keep(piece, out.read)
            if piece.ends:
                newest.append(DraftOutput(out.fed_back[:, -1:], out.read[:, -1:]))
        for slot, ids in enumerate(sequences):
            self.final[slot] = len(ids) - 1
        return DraftOutput(*(torch.cat(parts) for parts in zip(*newest, strict=True)))

    def _keep(self, piece: Piece, read: Float[Tensor, "B Q H"]) -> None:
        """Appends a piece's states to the newest ones."""
        slots = slice(piece.first_slot, piece.first_slot + len(read))
        window, width = self.states.shape[1], read.shape[1]
        both = torch.cat((self.states[slots], read), dim=1)
        column = torch.arange(window, device=read.device)
        kept = column + (width - piece.padding)[:, None]  # as many new ones as are no padding ...
        index = torch.where(kept < window, kept, column + width)  # ... which stand at the end
        self.states[slots] = both.gather(1, index[..., None].expand(-1, -1, read.shape[2]))

    def _draw(
        self, out: DraftOutput, position: Int[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
        logits = self.module.full_logits(out.read[:, -1:])[:, 0]
        return draw_draft(self.drafter.sampling, logits, self.keys[: len(logits)], position)

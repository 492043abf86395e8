"""One batch of requests, decoded to the end: prefill, verify steps, accepted windows.

Row i of the cache belongs to `self.order[i]`; finished requests are swapped behind the active ones, so that a step
runs on a contiguous block and finished rows keep their keys and values for probing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.capture import Capture
from ace_learn.engines.live import LiveRequest
from ace_learn.engines.requests import ExitRecord
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import SIGNALS
from ace_learn.exit.state import entropy_of
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows, Verdict
from ace_learn.models.cache import SlotCache
from ace_learn.models.target import RowOutputs, Target
from ace_learn.speculation.acceptance import emit, standard
from ace_learn.speculation.drafters import Drafter
from ace_learn.speculation.noise import Stream, gumbel, uniform


class BoundarySignals(NamedTuple):
    """A boundary that a request has passed."""

    output_index: int
    """Index of the boundary's token in the output."""
    paragraphs: int
    tokens_thought: int
    signals: dict[str, float]
    """Smoothed; zeros where the engine has no head."""


TokenListener = Callable[[LiveRequest, Sequence[int], Sequence[BoundarySignals]], None]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What the steps of a batch need besides the requests."""

    target: Target
    sampling: Sampling
    tracker: ExitTracker | None = None
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    aux_layers: tuple[int, ...] = ()
    capture: Capture | None = None
    listener: TokenListener | None = None
    """Called with every kept window and the boundaries among the tokens that it follows."""


class DecodeBatch:
    """Runs requests together; `run` returns when all are finished."""

    def __init__(self, decoding: Decoding, lives: list[LiveRequest], cache: SlotCache | None = None) -> None:
        """Prepares a batch; `cache` holds what stands before the requests' last tokens (a fork), or nothing."""
        self.decoding = decoding
        self.lives = lives
        self.device = decoding.target.device
        self.cache = decoding.target.new_cache(len(lives)) if cache is None else cache
        self.order = list(range(len(lives)))
        self.num_active = len(lives)
        self.forward_tokens = 0
        self.last_logprob = torch.zeros(len(lives), device=self.device)
        self._keys = torch.tensor([live.request.key for live in lives], device=self.device)
        self._prompt_lengths = torch.tensor([len(live.request.prompt_ids) for live in lives], device=self.device)

    @torch.inference_mode()
    def run(self, num_cached: Sequence[int] | None = None) -> None:
        """Decodes every request to its end; `num_cached[i]` positions of request i stand in the cache already."""
        self._started = time.perf_counter()
        if self.decoding.tracker is not None:
            self.decoding.tracker.admit(
                torch.arange(len(self.lives), device=self.device),
                self._prompt_lengths,
                in_think=torch.tensor([live.thinking for live in self.lives], device=self.device),
                armed=torch.tensor([live.request.thinking for live in self.lives], device=self.device),
            )
        self._prefill(num_cached or [0] * len(self.lives))
        while self.num_active:
            self._step()

    def slot_of(self, request: int) -> int:
        """Cache row of a request."""
        return self.order.index(request)

    def _active(self) -> list[LiveRequest]:
        return [self.lives[i] for i in self.order[: self.num_active]]

    def _prefill(self, num_cached: Sequence[int]) -> None:
        """Feeds what is not cached, padded on the left, and draws the first token.

        Padding is written behind the longest sequence, where the positions' mask hides it until it is overwritten.
        """
        feeds = [live.ids[start:] for live, start in zip(self.lives, num_cached, strict=True)]
        width, longest = max(map(len, feeds)), max(len(live.ids) for live in self.lives)
        tokens = torch.tensor([[0] * (width - len(feed)) + feed for feed in feeds], device=self.device)
        column = torch.arange(width, device=self.device)
        lengths = torch.tensor([len(live.ids) for live in self.lives], device=self.device)
        padding = width - torch.tensor([len(feed) for feed in feeds], device=self.device)
        positions = torch.where(column < padding[:, None], longest + column, lengths[:, None] - width + column)
        padded = width > min(map(len, feeds))
        outputs = self.decoding.target.forward(
            tokens, positions, self.cache, longest=longest + width * padded, last_only=True
        )
        self.forward_tokens += sum(map(len, feeds))
        none = torch.zeros(len(self.lives), 0, dtype=torch.long, device=self.device)
        self._accept(outputs, outputs.logits.log_softmax(-1), lengths - 1, none, [[] for _ in self.lives], None)

    def _step(self) -> None:
        lives = self._active()
        drafts = [self._draft(live) for live in lives]
        width = max(map(len, drafts))
        tokens = torch.tensor(
            [[live.ids[-1], *d, *[0] * (width - len(d))] for live, d in zip(lives, drafts, strict=True)]
        )
        base = torch.tensor([len(live.ids) - 1 for live in lives])
        tokens, base = tokens.to(self.device), base.to(self.device)
        positions = base[:, None] + torch.arange(width + 1, device=self.device)
        longest = max(len(live.ids) for live in lives) + width
        decoding = self.decoding
        outputs = decoding.target.forward(
            tokens, positions, self.cache, longest=longest, aux_layers=decoding.aux_layers
        )
        self.forward_tokens += len(lives) + sum(map(len, drafts))
        logprobs = outputs.logits.log_softmax(-1)
        verdict = self._observe(outputs, logprobs, tokens, positions)
        self._accept(outputs, logprobs, base, tokens[:, 1:], drafts, verdict)

    def _draft(self, live: LiveRequest) -> list[int]:
        room = min(self.decoding.num_draft_tokens, live.room - 1)
        if self.decoding.drafter is None or live.pending or room < 1:
            return []
        return self.decoding.drafter.propose(live.ids, room)

    def _observe(
        self,
        outputs: RowOutputs,
        logprobs: Float[Tensor, "B R V"],
        tokens: Int[Tensor, "B R"],
        positions: Int[Tensor, "B R"],
    ) -> Verdict | None:
        if self.decoding.tracker is None:
            return None
        slots = torch.tensor(self.order[: self.num_active], device=self.device)
        of_drafts = logprobs[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        rows = Rows(
            tokens=tokens,
            positions=positions,
            logprobs=torch.cat((self.last_logprob[: self.num_active, None], of_drafts), dim=1),
            entropy=entropy_of(logprobs),
            hidden=Hidden(outputs.last, outputs.aux),
        )
        return self.decoding.tracker.observe(slots, rows)

    def _accept(
        self,
        outputs: RowOutputs,
        logprobs: Float[Tensor, "B R V"],
        base: Int[Tensor, " B"],
        drafted: Int[Tensor, "B K"],
        drafts: list[list[int]],
        verdict: Verdict | None,
    ) -> None:
        """Samples, accepts, hands the windows to the requests and puts finished ones aside."""
        lives, decoding = self._active(), self.decoding
        num_drafted = torch.tensor([len(draft) for draft in drafts], device=self.device)
        target = self._forced(decoding.sampling.probabilities(outputs.logits), lives, verdict)
        keys = self._keys[self.order[: self.num_active]]
        drawn = base[:, None] + 1 + torch.arange(drafted.shape[1], device=self.device)
        seed = decoding.sampling.seed
        accept_noise = uniform(seed=seed, request=keys, position=drawn, stream=Stream.ACCEPT, size=1)[..., 0]
        verified = standard(
            target=target, drafted=drafted, num_drafted=num_drafted, draft=None, accept_noise=accept_noise
        )
        num_accepted = verified.num_accepted
        last = (base + 1 + num_accepted)[:, None]
        if decoding.sampling.temperature == 0.0:
            noise = verified.final.new_zeros(()).expand_as(verified.final)
        else:
            noise = gumbel(seed=seed, request=keys, position=last, size=target.shape[-1])[:, 0]
        tokens = emit(verified, drafted, noise)
        chosen = logprobs.gather(-1, tokens[..., None]).squeeze(-1)
        row = torch.arange(len(lives), device=self.device)
        self.last_logprob[: self.num_active] = chosen[row, num_accepted]
        if verdict is not None and decoding.capture is not None:
            self._capture(outputs, base, num_accepted, verdict)
        self._commit(lives, drafts, tokens.tolist(), num_accepted.tolist(), chosen.tolist(), verdict)

    def _forced(
        self, target: Float[Tensor, "B R V"], lives: list[LiveRequest], verdict: Verdict | None
    ) -> Float[Tensor, "B R V"]:
        """Replaces the distribution of forced rows by the one-hot on the forced token."""
        if verdict is None and not any(live.pending for live in lives):
            return target
        forced = torch.full(target.shape[:2], -1, device=self.device) if verdict is None else verdict.forced.clone()
        for i, live in enumerate(lives):
            if live.pending:
                forced[i, 0] = live.pending.pop(0)
        one_hot = torch.zeros_like(target).scatter(-1, forced.clamp_min(0)[..., None], 1.0)
        return torch.where((forced >= 0)[..., None], one_hot, target)

    def _capture(
        self, outputs: RowOutputs, base: Int[Tensor, " B"], num_accepted: Int[Tensor, " B"], verdict: Verdict
    ) -> None:
        assert self.decoding.capture is not None
        requests = torch.tensor(self.order[: self.num_active], device=self.device)
        column = torch.arange(outputs.last.shape[1], device=self.device)
        valid: Bool[Tensor, "B R"] = column <= num_accepted[:, None]
        output_index = base[:, None] + column - self._prompt_lengths[requests][:, None]
        hidden = Hidden(outputs.last, outputs.aux)
        self.decoding.capture.add(requests, output_index, valid, verdict, hidden)

    def _commit(
        self,
        lives: list[LiveRequest],
        drafts: list[list[int]],
        tokens: list[list[int]],
        num_accepted: list[int],
        logprobs: list[list[float]],
        verdict: Verdict | None,
    ) -> None:
        forced = None if verdict is None else verdict.forced.tolist()
        for i, live in enumerate(lives):
            size = num_accepted[i] + 1
            before = live.length
            if forced is not None and live.exit is None:
                self._note_exit(live, forced[i][:size], i, verdict)
            kept = live.push(tokens[i][:size], logprobs[i][:size], num_accepted=num_accepted[i])
            if live.exit is not None and live.exit.output_index >= live.length:
                live.exit = None
            live.stats.record(len(drafts[i]), min(num_accepted[i], kept))
            if self.decoding.listener is not None and kept:
                self.decoding.listener(live, live.output_ids[before:], _passed(verdict, i, size, before))
        self._retire(lives)

    def _note_exit(self, live: LiveRequest, forced: list[int], row: int, verdict: Verdict | None) -> None:
        assert verdict is not None
        r = next((r for r, token in enumerate(forced) if token >= 0), None)
        if r is not None:
            live.exit = ExitRecord(
                output_index=live.length + r,
                tokens_thought=int(verdict.thought[row, r]),
                paragraphs=int(verdict.paragraphs[row, r]),
                signals=dict(zip(SIGNALS, verdict.smoothed[row, r].tolist(), strict=True)),
            )

    def _retire(self, lives: list[LiveRequest]) -> None:
        """Swaps finished requests behind the active ones."""
        seconds = time.perf_counter() - self._started
        for slot in range(self.num_active - 1, -1, -1):
            if lives[slot].finish is None:
                continue
            lives[slot].seconds = seconds
            self.num_active -= 1
            last = self.num_active
            if slot != last:
                self.cache.swap(slot, last)
                self.last_logprob[[slot, last]] = self.last_logprob[[last, slot]]
                self.order[slot], self.order[last] = self.order[last], self.order[slot]


def _passed(verdict: Verdict | None, row: int, size: int, before: int) -> list[BoundarySignals]:
    """Boundaries among the first `size` input tokens of a row, the first of which is output token `before - 1`."""
    if verdict is None:
        return []
    return [
        BoundarySignals(
            output_index=before - 1 + r,
            paragraphs=int(verdict.paragraphs[row, r]),
            tokens_thought=int(verdict.thought[row, r]),
            signals=dict(zip(SIGNALS, verdict.smoothed[row, r].tolist(), strict=True)),
        )
        for r in range(size)
        if verdict.closed[row, r]
    ]

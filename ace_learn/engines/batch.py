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

from ace_learn.engines.acceptance_reader import AcceptanceReader
from ace_learn.engines.capture import Capture
from ace_learn.engines.live import LiveRequest
from ace_learn.engines.requests import ExitRecord
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.state import entropy_of
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows, Verdict
from ace_learn.models.cache import SlotCache
from ace_learn.models.catch_up import catch_up
from ace_learn.models.target import RowOutputs, Target, select_layers
from ace_learn.signals import named
from ace_learn.speculation.acceptance import Window, emit, follow, verify
from ace_learn.speculation.adaptive import AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter, Drafts
from ace_learn.speculation.noise import Stream, gumbel, uniform
from ace_learn.speculation.rules import AcceptanceConfig


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
    acceptance: AcceptanceConfig = AcceptanceConfig()
    verifier: AdaptiveVerifier | None = None
    """Predicts which drafts are accepted, and trims the others; None: every draft is verified."""
    acceptance_reader: AcceptanceReader | None = None
    """Reads the columns of the signal `acceptance`; None: nothing needs them."""
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
        self._drafting = None if decoding.drafter is None else decoding.drafter.start(self._keys)
        self._verification = None if decoding.verifier is None else decoding.verifier.start(len(lives))
        self._taps = () if decoding.drafter is None else decoding.drafter.taps
        self._tapped = tuple(sorted({*decoding.aux_layers, *self._taps}))

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
                contracts=[live.request.contract for live in self.lives],
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
        """Feeds what is not cached, and draws the first token."""
        assert not (self._taps and any(num_cached)), "a drafter must see the hidden states of the whole prompt"
        feeds = [live.ids[start:] for live, start in zip(self.lives, num_cached, strict=True)]
        lengths = [len(live.ids) for live in self.lives]
        observer = None if self._drafting is None or not self._taps else self._drafting
        logits = catch_up(self.decoding.target, self.cache, feeds, lengths, taps=self._taps, observer=observer)[:, None]
        self.forward_tokens += sum(map(len, feeds))
        base = torch.tensor(lengths, device=self.device) - 1
        none = Drafts.none(len(self.lives), self.device)
        window = self._window(logits, self._forced(self.lives, 1, None), base, none, None)
        self._commit(none, window, logits.log_softmax(-1), None)

    def _step(self) -> None:
        lives = self._active()
        drafts = self._draft(lives)
        if self._verification is not None:
            thinking = torch.tensor([live.thinking for live in lives], device=self.device)
            drafts = self._verification.admit(drafts, self.order[: self.num_active], thinking)
        newest = torch.tensor([live.ids[-1] for live in lives], device=self.device)
        tokens = torch.cat((newest[:, None], drafts.tokens), dim=1)
        base = torch.tensor([len(live.ids) - 1 for live in lives], device=self.device)
        width = tokens.shape[1]
        positions = base[:, None] + torch.arange(width, device=self.device)
        longest = max(len(live.ids) for live in lives) + width - 1
        decoding = self.decoding
        outputs = decoding.target.forward(tokens, positions, self.cache, longest=longest, aux_layers=self._tapped)
        if self._drafting is not None:
            self._drafting.observe(positions, select_layers(outputs.aux, self._tapped, self._taps), longest=longest)
        self.forward_tokens += len(lives) + int(drafts.num_drafted.sum())
        logprobs = outputs.logits.log_softmax(-1)
        hidden = self._hidden(outputs, drafts)
        verdict = self._observe(hidden, logprobs, tokens, positions)
        forced = self._forced(lives, width, verdict)
        window = self._window(outputs.logits, forced, base, drafts, verdict)
        if verdict is not None and decoding.capture is not None:
            self._capture(hidden, base, window.num_accepted, verdict)
        requests, before = self.order[: self.num_active], [live.length for live in lives]
        self._commit(drafts, window, logprobs, verdict)
        if self._verification is not None:
            self._verification.observe(window.num_accepted, drafts.num_drafted, forced[:, :-1] < 0)
            kept = [max(0, live.length - length) for live, length in zip(lives, before, strict=True)]
            self._verification.keep(requests, kept)

    def _draft(self, lives: list[LiveRequest]) -> Drafts:
        """Asks the drafter; where a think end is pending, nothing can be proposed."""
        most = self.decoding.num_draft_tokens
        room = [0 if live.pending else max(0, min(most, live.room - 1)) for live in lives]
        if self._drafting is None:
            return Drafts.none(len(lives), self.device)
        return self._drafting.draft([live.ids for live in lives], room)

    def _hidden(self, outputs: RowOutputs, drafts: Drafts) -> Hidden:
        """What signals may read of the rows."""
        aux = select_layers(outputs.aux, self._tapped, self.decoding.aux_layers)
        read, states = self.decoding.acceptance_reader, drafts.states
        if states is None:
            return Hidden(outputs.last, aux)
        states = states[:, : outputs.last.shape[1]]
        return Hidden(outputs.last, aux, states, None if read is None else read(states))

    def _observe(
        self,
        hidden: Hidden,
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
            entropy=torch.stack([entropy_of(row) for row in logprobs.unbind(1)], dim=1),  # small temporaries
            hidden=hidden,
        )
        return self.decoding.tracker.observe(slots, rows)

    def _forced(self, lives: list[LiveRequest], width: int, verdict: Verdict | None) -> Int[Tensor, "B R"]:
        """The token that must follow each row, or -1: an exit's think end, or what is left of a longer one."""
        pending = [live.pending.pop(0) if live.pending else -1 for live in lives]
        first = torch.tensor(pending, device=self.device)
        forced = torch.full((len(lives), width), -1, device=self.device) if verdict is None else verdict.forced.clone()
        forced[:, 0] = torch.where(first >= 0, first, forced[:, 0])
        return forced

    def _window(
        self,
        logits: Float[Tensor, "B R V"],
        forced: Int[Tensor, "B R"],
        base: Int[Tensor, " B"],
        drafts: Drafts,
        verdict: Verdict | None,
    ) -> Window:
        """Accepts drafts and draws the token behind them."""
        sampling = self.decoding.sampling
        if sampling.temperature == 0.0:
            choice = torch.where(forced >= 0, forced, logits.argmax(-1))
            return follow(choice, drafts.tokens, drafts.num_drafted)
        keys = self._keys[self.order[: self.num_active]]
        drawn = base[:, None] + 1 + torch.arange(drafts.tokens.shape[1], device=self.device)
        accept_noise = uniform(seed=sampling.seed, request=keys, position=drawn, stream=Stream.ACCEPT, size=1)
        relaxed = None
        if self.decoding.acceptance.only_in_think and drafts.tokens.shape[1]:
            assert verdict is not None, "the engine tracks the think span for this rule"
            relaxed = verdict.in_think[:, :-1]
        verified = verify(
            self.decoding.acceptance,
            target=sampling.probabilities(logits),
            drafted=drafts.tokens,
            num_drafted=drafts.num_drafted,
            draft=drafts.probabilities,
            accept_noise=accept_noise[..., 0],
            forced=forced,
            relaxed=relaxed,
        )
        last = (base + 1 + verified.num_accepted)[:, None]
        noise = gumbel(seed=sampling.seed, request=keys, position=last, size=logits.shape[-1])
        return emit(verified, drafts.tokens, noise[:, 0])

    def _capture(
        self, hidden: Hidden, base: Int[Tensor, " B"], num_accepted: Int[Tensor, " B"], verdict: Verdict
    ) -> None:
        assert self.decoding.capture is not None
        requests = torch.tensor(self.order[: self.num_active], device=self.device)
        column = torch.arange(hidden.last.shape[1], device=self.device)
        valid: Bool[Tensor, "B R"] = column <= num_accepted[:, None]
        output_index = base[:, None] + column - self._prompt_lengths[requests][:, None]
        self.decoding.capture.add(requests, output_index, valid, verdict, hidden)

    def _commit(
        self, drafts: Drafts, window: Window, logprobs: Float[Tensor, "B R V"], verdict: Verdict | None
    ) -> None:
        """Hands the windows to the requests and puts finished ones aside."""
        lives = self._active()
        chosen = logprobs.gather(-1, window.tokens[..., None]).squeeze(-1)
        row = torch.arange(len(lives), device=self.device)
        self.last_logprob[: self.num_active] = chosen[row, window.num_accepted]
        tokens, num_accepted = window.tokens.tolist(), window.num_accepted.tolist()
        num_drafted, raw, kl = drafts.num_drafted.tolist(), chosen.tolist(), window.kl.tolist()
        forced = None if verdict is None else verdict.forced.tolist()
        for i, live in enumerate(lives):
            size = num_accepted[i] + 1
            before = live.length
            if forced is not None and live.exit is None:
                self._note_exit(live, forced[i][:size], i, verdict)
            kept = live.push(tokens[i][:size], raw[i][:size], num_accepted=num_accepted[i])
            if live.exit is not None and live.exit.output_index >= live.length:
                live.exit = None
            live.stats.record(num_drafted[i], live.accepted_since(before), kl[i])
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
                signals=named(verdict.smoothed[row, r].tolist()),
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
                if self._drafting is not None:
                    self._drafting.swap(slot, last)
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
            signals=named(verdict.smoothed[row, r].tolist()),
        )
        for r in range(size)
        if verdict.closed[row, r]
    ]

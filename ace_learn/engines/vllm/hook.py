"""The exit rule inside a vLLM runner: called once per step, between the forward pass and sampling."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ace_learn.engines.vllm.drafted import DraftedRows, DraftedStates
from ace_learn.engines.vllm.events import ExitOptions, StepReport
from ace_learn.engines.vllm.judge import STATE_SIZE, Judge, settings_of
from ace_learn.engines.vllm.measure import Meter, Reads, TokenLogits
from ace_learn.engines.vllm.reports import Followed, HostBuffers, Part, Pending
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.engines.vllm.slots import NOWHERE, SlotTable, to_device
from ace_learn.engines.vllm.step import DeviceStep, Outcome
from ace_learn.engines.vllm.waiting import LastLook, Member, ThinkingRows, WaitingRows, rows_together
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.state import SpanMachine
from ace_learn.exit.tracker import Signaller
from ace_learn.features.spec import FeatureSpec
from ace_learn.thinking import BoundaryTables, ThinkMarkers, closes_think, opens_think

logger = logging.getLogger(__name__)

_WINDOW = 64
"""Positions whose state is kept at least: rejected drafts, dropped steps, and rows that are run again must fit."""
_BROKEN = "a signal that the exit policy reads is NaN"


class ExitHook:
    """Follows the thinking of a runner's requests and says which tokens must come next.

    Attributes:
        reads_aux: Whether rows must bring `aux`.
        reads_logits: Whether anything is computed from the logits.
        drafted: Where the drafter's states are kept, by `keep_drafted`; None where nothing reads them.
    """

    def __init__(
        self,
        *,
        markers: ThinkMarkers,
        tables: BoundaryTables,
        policy: ExitPolicy,
        signaller: Signaller | None,
        spec: FeatureSpec | None,
        token_logits: TokenLogits,
        device: torch.device,
        num_draft_tokens: int,
        steps_in_flight: int = 2,
        max_failures: int = 16,
        ranks: int = 1,
        reports: bool = True,
        compiled: bool = False,
        num_requests: int = 1,
    ) -> None:
        """Prepares the hook of one runner.

        Args:
            markers: Think markers of the target.
            tables: Boundary tables of the target.
            policy: The server's policy; requests may bring other bounds of the same family.
            signaller: The head (`HeadSignaller`); None only with a policy that reads no learned signal.
            spec: What the head reads; None without a head.
            token_logits: Computes one logit per row; under tensor parallelism together with the other ranks.
            device: Where the rows are.
            num_draft_tokens: Drafted tokens per step at most, K.
            steps_in_flight: Steps that may be launched before the first one's tokens are known.
            max_failures: Failures after which the hook is off for the process.
            ranks: Ranks that run the same rows; with more than one, nothing hangs on when reports are read.
            reports: Whether this rank's reports are read.
            compiled: Compile what happens on the device; `warm_up` must come first.
            num_requests: Requests that there is room for from the start; a compiled step has no more.

        Raises:
            ValueError: The head or the policy reads what a runner cannot give.
        """
        self._markers, self._family = markers, policy
        self._max_failures, self._alone, self._reports = max_failures, ranks == 1, reports
        reads = Reads.of(policy, spec)
        self.reads_aux, self.reads_logits = reads.aux, reads.entropy or reads.logprobs
        may_wait = compiled and device.type == "cpu" and num_draft_tokens == 0 and policy.smooth_over == "boundaries"
        self._thinking = LastLook()
        together = rows_together(num_requests, len(tables.breaks)) if may_wait else 1
        width = num_draft_tokens + together
        in_flight = width * (steps_in_flight + 1) + 1
        self._settling = 1 << (in_flight - 1).bit_length()
        """Positions behind which nothing is in flight any more."""
        states = None if spec is None else spec.draft
        self.drafted = None if states is None else DraftedStates(states, self._settling + states.delay)
        with torch.inference_mode():
            machine = SpanMachine(markers, tables, device)
            end = torch.tensor(markers.end, device=device)
            judge = Judge(machine=machine, family=policy, signaller=signaller, end=end)
            self._table = SlotTable(
                state_size=STATE_SIZE,
                num_settings=len(settings_of(policy, policy, prompt_length=0, forces=True)),
                window=max(_WINDOW, self._settling),
                device=device,
                num_requests=num_requests,
            )
        self._waiting: WaitingRows | None = None
        if together > 1:
            self._waiting = WaitingRows(markers, tables, together=together)
        meter = Meter(
            reads=reads,
            token_logits=token_logits,
            vocab_size=judge.vocab_size,
            window=self._settling,
            table=self._table,
            drafted=self.drafted,
        )
        self._step = DeviceStep(
            judge=judge,
            meter=meter,
            table=self._table,
            max_failures=max_failures,
            width=width,
            folds=together > 1,
            compiled=compiled,
        )
        self._requests: dict[str, Followed | None] = {}
        self._news: list[tuple[str, str]] = []
        self._pending: deque[Pending] = deque()
        self._buffers = HostBuffers(device)
        self._num_raised = self._num_broken = 0
        self._compiled = compiled
        self._last: ThinkingRows | None = None

    @property
    def off(self) -> bool:
        """Whether the hook has failed too often in this process."""
        return self._num_raised + self._num_broken >= self._max_failures

    @property
    def num_followed(self) -> int:
        """Requests that hold a slot."""
        return self._table.num_taken

    @property
    def thinking(self) -> Bool[Tensor, " R"] | None:
        """Rows of the last step whose next token is thought; None where no request was followed."""
        return None if self._last is None else self._last.thinking

    @property
    def open(self) -> Bool[Tensor, " R"] | None:
        """Those of `thinking` whose request may be forced; None where none may."""
        return None if self._last is None else self._last.open

    def warm_up(self, rows: RowTensors) -> None:
        """Compiles what happens in every step, if it is to be compiled; on two rows like all to come."""
        self._step.warm_up(rows)

    def admit(self, request_id: str, prompt_ids: Sequence[int], options: ExitOptions) -> None:
        """Starts following a request; one that is known (resumed after a preemption) keeps its state."""
        if request_id in self._requests:
            return
        self._requests[request_id] = None
        if not options.exits or options.policy is None or self._family.predicate == "never":
            return
        if closes_think(prompt_ids, self._markers):
            return
        try:
            settings = settings_of(
                options.policy, self._family, prompt_length=len(prompt_ids), forces=not options.shadow
            )
        except ValueError as error:
            self._give_up([request_id], error)
            return
        if self._compiled and self._table.full:
            self._news.append((request_id, "a compiled exit rule has no room for so many requests at once"))
            return
        slot, in_think = self._table.take(), opens_think(prompt_ids, self._markers)
        self._table.admit(slot, len(prompt_ids), settings, in_think=in_think)
        self._requests[request_id] = Followed(request_id, slot, len(prompt_ids), forces=not options.shadow)
        self._thinking.keep(request_id, in_think, in_think and not options.shadow)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ones are ignored."""
        for request_id in request_ids:
            followed = self._requests.pop(request_id, None)
            self._thinking.drop(request_id)
            if self._waiting is not None:
                self._waiting.drop(request_id)
            if followed is not None:
                followed.active = False
                self._table.release(followed.slot)

    def abandon(self, request_ids: Sequence[str], error: Exception) -> None:
        """Gives up the followed requests of a step whose rows could not be read; stands in for `observe`."""
        self._last = None
        picks = self._picks(request_ids)
        if picks:
            self._give_up([followed.request_id for _, followed in picks], error)
        pending = Pending()
        pending.failures, self._news = self._news, []
        if self._reports:
            self._pending.append(pending)

    @torch.inference_mode()
    def observe(self, rows: StepRows) -> Int[Tensor, " R"] | None:
        """The token that must follow each row, or -1; None where no row can be forced. Never raises.

        Each call must be followed by one of `report`, in the same order.
        """
        pending, forced = Pending(), None
        self._last = None
        picks = self._picks(rows.request_ids)
        if picks:
            try:
                decide = self._decide if self._waiting is None else self._wait
                forced = decide(rows, picks, pending)
            except Exception as error:  # noqa: BLE001  # the engine must outlive whatever a head does
                pending.parts, self._last = [], None
                self._give_up([followed.request_id for _, followed in picks if followed.active], error)
        pending.failures, self._news = self._news, []
        if self._reports:
            self._pending.append(pending)
        return forced

    @torch.inference_mode()
    def keep_drafted(self, request_ids: Sequence[str], read: Callable[[], DraftedRows]) -> None:
        """Keeps the states of what a drafter has run behind a step. Never raises.

        Args:
            request_ids: Of the step.
            read: Reads the states out of the runner.
        """
        picks = dict(self._picks(request_ids))
        if not picks or self.drafted is None:
            return
        try:
            slots = [picks[i].slot if i in picks else NOWHERE for i in range(len(request_ids))]
            self.drafted.keep(read(), to_device(torch.tensor(slots), self._table.device), self._table)
        except Exception as error:  # noqa: BLE001  # as in `observe`
            self._give_up([followed.request_id for followed in picks.values()], error)

    def report(self) -> StepReport:
        """What the oldest step gave that has not been reported; any thread may ask.

        To be called once the step's copies to the host are done: it does not wait for them.
        """
        pending = self._pending.popleft()
        found = pending.read()
        self._buffers.give_back([part.values for part in pending.parts])
        for followed in found.broken:
            self._num_broken += 1
            pending.failures.append((followed.request_id, _BROKEN))
            self._log(followed.request_id, _BROKEN)
            followed.active = followed.active and not self._alone
        for followed, since in found.over:
            self._settle(followed, since)
        return StepReport(found.exits, found.blocked, pending.failures, self.off)

    def _picks(self, request_ids: Sequence[str]) -> list[tuple[int, Followed]]:
        """The requests of a step to which the rule is applied, with their places in the step."""
        if self._num_raised >= self._max_failures or (self._alone and self.off):
            return []
        picks = []
        for index, request_id in enumerate(request_ids):
            if request_id not in self._requests:
                self._requests[request_id] = None
                self._give_up([request_id], LookupError("the request has rows, but was never admitted"))
            followed = self._requests[request_id]
            if followed is not None and followed.active:
                picks.append((index, followed))
        return picks

    def _decide(self, rows: StepRows, picks: list[tuple[int, Followed]], pending: Pending) -> Int[Tensor, " R"] | None:
        """Applies the rule to a step."""
        outcome = self._follow(rows, picks, pending)
        if outcome is None:
            return None
        forces = any(followed.forces for _, followed in picks)
        self._last = ThinkingRows(outcome.thinking, outcome.open if forces else None)
        return outcome.forced if forces else None

    def _follow(self, rows: StepRows, picks: list[tuple[int, Followed]], pending: Pending) -> Outcome | None:
        """Applies the rule to some requests of a step."""
        rows.check()
        self._table.flush()
        try:
            outcome = self._step(rows, *_split(picks))
        except Exception as error:  # noqa: BLE001  # a head may fail for one request and not for another
            picks = self._without_culprits(rows, picks, error)
            if not picks:
                return None
            outcome = self._step(rows, *_split(picks))
        by_place = dict(picks)
        places = [index for index, _ in picks] if rows.starts is None else range(len(rows.request_ids))
        owners = [by_place.get(index) for index in places]
        pending.parts.append(Part(owners, self._buffers.copy(outcome.report)))
        return outcome

    def _wait(self, rows: StepRows, picks: list[tuple[int, Followed]], pending: Pending) -> Int[Tensor, " R"] | None:
        """Lets the rows wait, or applies the rule where one is there that matters."""
        assert self._waiting is not None
        rows.check()
        positions = rows.positions.tolist()
        members = [
            Member(followed.request_id, place, positions[place])
            for place, followed in picks
            if positions[place] >= followed.prompt_length - 1
        ]
        due = self._waiting.add(rows, members)
        forced = self._follow_waiting(due, pending) if due else {}
        live = {followed.request_id for _, followed in picks if followed.active}
        self._last = self._thinking.rows(rows.request_ids, live)
        return torch.tensor([forced.get(request_id, -1) for request_id in rows.request_ids]) if forced else None

    def _follow_waiting(self, request_ids: Sequence[str], pending: Pending) -> dict[str, int]:
        """Applies the rule to what waits of some requests; what must follow their last rows, where that is said."""
        assert self._waiting is not None
        rows = self._waiting.take(request_ids)
        picks = self._picks(rows.request_ids)
        try:
            outcome = self._follow(rows, picks, pending) if picks else None
        except Exception as error:  # noqa: BLE001  # as in `observe`, for those whose rows they were
            self._give_up([followed.request_id for _, followed in picks if followed.active], error)
            return {}
        if outcome is None:
            return {}
        ends = np.cumsum(rows.counts) - 1
        thinking, open_, tokens = (values[ends].tolist() for values in outcome[1:3] + outcome[:1])
        for name, *seen in zip(rows.request_ids, thinking, open_, strict=True):
            self._thinking.keep(name, *seen)
        forced = {name: token for name, token in zip(rows.request_ids, tokens, strict=True) if token >= 0}
        if len(self._markers.end) > 1:
            self._waiting.urgent |= forced.keys()
        return forced

    def _without_culprits(
        self, rows: StepRows, picks: list[tuple[int, Followed]], error: Exception
    ) -> list[tuple[int, Followed]]:
        """What is left of a step that failed, without the requests that fail alone too.

        Raises:
            Exception: The error, if it is nobody's alone.
        """
        if rows.starts is not None:  # the host does not know whose rows are whose
            raise error
        good: list[tuple[int, Followed]] = []
        bad: list[tuple[str, Exception]] = []
        attempt = self._step.attempts(rows, *_split(picks))
        for index, (place, followed) in enumerate(picks):
            try:
                attempt(index)
            except Exception as alone:  # noqa: BLE001  # whatever it is, it is this request's
                bad.append((followed.request_id, alone))
            else:
                good.append((place, followed))
        if not bad:
            raise error
        for request_id, own in bad:
            self._give_up([request_id], own)
        return good

    def _settle(self, followed: Followed, since: int | None) -> None:
        """Leaves a request alone once its thinking is over for good: no step in flight can take it back."""
        if since is None or followed.over_since is None:
            followed.over_since = since
        elif self._alone and since - followed.over_since >= self._settling:
            followed.active = False

    def _give_up(self, request_ids: Sequence[str], error: Exception) -> None:
        """Leaves requests alone from now on: one failure, be it one request's or that of all in a step."""
        self._num_raised += 1
        self._step.count_failure()
        what = f"{type(error).__name__}: {error}"
        for request_id in request_ids:
            followed = self._requests[request_id]
            if followed is not None:
                followed.active = False
            if self._waiting is not None:
                self._waiting.drop(request_id)
            self._news.append((request_id, what))
        self._log(", ".join(request_ids), what, error)

    def _log(self, requests: str, what: str, error: Exception | None = None) -> None:
        """Logs the first failure, and the one that was too many."""
        failures = self._num_raised + self._num_broken
        if failures == 1:
            logger.error("exits are given up for %s, and it goes on without: %s", requests, what, exc_info=error)
        if failures == self._max_failures:
            logger.error("the exit hook is off after %d failures; requests go on without exits", failures)


def _split(picks: list[tuple[int, Followed]]) -> tuple[list[int], list[int]]:
    """Places in the step, and slots."""
    return [index for index, _ in picks], [followed.slot for _, followed in picks]

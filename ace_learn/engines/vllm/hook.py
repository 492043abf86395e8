"""The exit rule inside a vLLM runner: called once per step, between the forward pass and sampling."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ace_learn.engines.vllm.events import StepReport
from ace_learn.engines.vllm.judge import STATE_SIZE, Judge, Judged, settings_of
from ace_learn.engines.vllm.measure import Measured, Meter, Reads, TokenLogits
from ace_learn.engines.vllm.reports import Followed, HostBuffers, Pending, pack
from ace_learn.engines.vllm.rows import Layout, StepRows
from ace_learn.engines.vllm.slots import NOWHERE, SlotTable
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.state import SpanMachine
from ace_learn.exit.tracker import Signaller
from ace_learn.features.spec import FeatureSpec
from ace_learn.signals import LEARNED
from ace_learn.thinking import BoundaryTables, ThinkMarkers, closes_think, opens_think

logger = logging.getLogger(__name__)

_WINDOW = 64
"""Positions whose state is kept at least: rejected drafts, dropped steps, and rows that are run again must fit."""
_BROKEN = "a signal that the exit policy reads is NaN"


@runtime_checkable
class ExitOptions(Protocol):
    """What the hook reads of a request's options."""

    @property
    def exits(self) -> bool:
        """Whether the rule runs."""
        ...

    @property
    def shadow(self) -> bool:
        """Whether it only records."""
        ...

    @property
    def policy(self) -> ExitPolicy | None:
        """With which bounds; of the same family as the server's policy."""
        ...


class ExitHook:
    """Follows the thinking of a runner's requests and says which tokens must come next.

    Attributes:
        reads_aux: Whether rows must bring `aux`.
        reads_logits: Whether anything is computed from the logits.
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

        Raises:
            ValueError: The head or the policy reads what a runner cannot give.
        """
        _refuse_without_head(policy, signaller)
        self._markers, self._family = markers, policy
        self._max_failures, self._alone, self._reports = max_failures, ranks == 1, reports
        reads = Reads.of(policy, spec)
        self.reads_aux, self.reads_logits = reads.aux, reads.entropy or reads.logprobs
        in_flight = (num_draft_tokens + 1) * (steps_in_flight + 1) + 1
        self._settling = 1 << (in_flight - 1).bit_length()
        """Positions behind which nothing is in flight any more."""
        with torch.inference_mode():
            machine = SpanMachine(markers, tables, device)
            end = torch.tensor(markers.end, device=device)
            self._judge = Judge(machine=machine, family=policy, signaller=signaller, end=end)
            self._table = SlotTable(
                state_size=STATE_SIZE,
                num_settings=len(settings_of(policy, policy, prompt_length=0, forces=True)),
                window=max(_WINDOW, self._settling),
                device=device,
            )
            self._failed = torch.zeros((), device=device)
        self._meter = Meter(
            reads=reads, token_logits=token_logits, vocab_size=len(tables.breaks), window=self._settling
        )
        self._requests: dict[str, Followed | None] = {}
        self._news: list[tuple[str, str]] = []
        self._pending: deque[Pending] = deque()
        self._buffers = HostBuffers(device)
        self._num_raised = self._num_broken = 0
        self._last: tuple[Layout, Judged, int] | None = None

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
        return self._spread(shadowed=True)

    @property
    def open(self) -> Bool[Tensor, " R"] | None:
        """Those of `thinking` whose request may be forced."""
        return self._spread(shadowed=False)

    def _spread(self, *, shadowed: bool) -> Bool[Tensor, " R"] | None:
        if self._last is None:
            return None
        layout, judged, size = self._last
        thinking = judged.thinking() if shadowed else judged.thinking() & judged.forces[:, None]
        return layout.spread(layout.to_rows(thinking.long()), size) > 0

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
        slot = self._table.take()
        self._table.admit(slot, len(prompt_ids), settings, in_think=opens_think(prompt_ids, self._markers))
        self._requests[request_id] = Followed(request_id, slot, forces=not options.shadow)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ones are ignored."""
        for request_id in request_ids:
            followed = self._requests.pop(request_id, None)
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
                forced = self._follow(rows, picks, pending)
            except Exception as error:  # noqa: BLE001  # the engine must outlive whatever a head does
                pending.values = self._last = None
                self._give_up([followed.request_id for _, followed in picks if followed.active], error)
        pending.failures, self._news = self._news, []
        if self._reports:
            self._pending.append(pending)
        return forced

    def report(self) -> StepReport:
        """What the oldest step gave that has not been reported; any thread may ask.

        To be called once the step's copies to the host are done: it does not wait for them.
        """
        pending = self._pending.popleft()
        found = pending.read()
        self._buffers.give_back(pending.values)
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

    def _follow(self, rows: StepRows, picks: list[tuple[int, Followed]], pending: Pending) -> Int[Tensor, " R"] | None:
        """Applies the rule to some requests of a step."""
        rows.check()
        self._table.flush()
        layout = _layout(rows, picks)
        measured = self._meter.measure(rows, layout, self._table)
        try:
            judged = self._judge(layout, measured, self._table)
        except Exception as error:  # noqa: BLE001  # a head may fail for one request and not for another
            picks, layout, measured = self._without_culprits(rows, picks, layout, measured, error)
            if not picks:
                return None
            judged = self._judge(layout, measured, self._table)
        self._store(layout, measured, judged)
        judged, broken = self._count(layout, judged)
        by_place = dict(picks)
        places = [index for index, _ in picks] if rows.starts is None else range(len(rows.request_ids))
        pending.owners = [by_place.get(index) for index in places]
        pending.width = layout.real.shape[1]
        self._last = layout, judged, len(rows.tokens)
        pending.values = self._buffers.copy(pack(judged, layout.to_grid(measured.positions), broken))
        if not any(followed.forces for _, followed in picks):
            return None
        return layout.spread(layout.to_rows(judged.forced), len(rows.tokens))

    def _without_culprits(
        self,
        rows: StepRows,
        picks: list[tuple[int, Followed]],
        layout: Layout,
        measured: Measured,
        error: Exception,
    ) -> tuple[list[tuple[int, Followed]], Layout, Measured]:
        """What is left of a step that failed, without the requests that fail alone too.

        Raises:
            Exception: The error, if it is nobody's alone.
        """
        if rows.starts is not None:  # the host does not know whose rows are whose
            raise error
        good: list[tuple[int, Followed]] = []
        keep: list[int] = []
        first = 0
        for index, (place, followed) in enumerate(picks):
            count = int(rows.counts[place])
            try:
                self._judge(layout.single(index, count), measured.select(slice(first, first + count)), self._table)
            except Exception as alone:  # noqa: BLE001  # whatever it is, it is this request's
                self._give_up([followed.request_id], alone)
            else:
                good.append((place, followed))
                keep += range(first, first + count)
            first += count
        if len(good) == len(picks):
            raise error
        if not good:
            return [], layout, measured
        return good, _layout(rows, good), measured.select(torch.tensor(keep, device=rows.tokens.device))

    def _store(self, layout: Layout, measured: Measured, judged: Judged) -> None:
        """Keeps the states of the rows that hang on nothing but their prefix."""
        slots = torch.where(judged.known, layout.slots[:, None], NOWHERE)
        positions = layout.to_grid(measured.positions)
        self._table.states.store(slots.flatten(), positions.flatten(), judged.states.flatten(0, 1))
        self._meter.keep(layout, measured, judged.known)

    def _count(self, layout: Layout, judged: Judged) -> tuple[Judged, Bool[Tensor, " B"]]:
        """Counts requests whose signals are NaN, once each; after too many of them nothing is forced any more.

        Counted on the device, so that ranks agree on it whenever their reports are read.
        """
        counted = self._table.counted[layout.slots]
        broken = judged.broken & ~counted
        self._table.counted[layout.slots] = counted | broken
        self._failed += broken.sum()
        on = self._failed < self._max_failures - self._num_raised
        fired, blocked = judged.fired & on, judged.blocked & on
        return judged._replace(forced=torch.where(on, judged.forced, -1), fired=fired, blocked=blocked), broken

    def _settle(self, followed: Followed, since: int | None) -> None:
        """Leaves a request alone once its thinking is over for good: no step in flight can take it back."""
        if since is None or followed.over_since is None:
            followed.over_since = since
        elif self._alone and since - followed.over_since >= self._settling:
            followed.active = False

    def _give_up(self, request_ids: Sequence[str], error: Exception) -> None:
        """Leaves requests alone from now on: one failure, be it one request's or that of all in a step."""
        self._num_raised += 1
        what = f"{type(error).__name__}: {error}"
        for request_id in request_ids:
            followed = self._requests[request_id]
            if followed is not None:
                followed.active = False
            self._news.append((request_id, what))
        self._log(", ".join(request_ids), what, error)

    def _log(self, requests: str, what: str, error: Exception | None = None) -> None:
        """Logs the first failure, and the one that was too many."""
        failures = self._num_raised + self._num_broken
        if failures == 1:
            logger.error("exits are given up for %s, and it goes on without: %s", requests, what, exc_info=error)
        if failures == self._max_failures:
            logger.error("the exit hook is off after %d failures; requests go on without exits", failures)


def _layout(rows: StepRows, picks: list[tuple[int, Followed]]) -> Layout:
    return Layout.of(rows, [index for index, _ in picks], [followed.slot for _, followed in picks])


def _refuse_without_head(policy: ExitPolicy, signaller: Signaller | None) -> None:
    learned = [name for name in policy.signals if name in LEARNED]
    if signaller is None and learned:
        raise ValueError(
            f"the exit policy {policy.predicate!r} reads signals ({', '.join(learned)}): name a head folder to compute "
            "them"
        )

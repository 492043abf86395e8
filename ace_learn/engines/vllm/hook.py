"""The exit rule inside a vLLM runner: called once per step, between the forward pass and sampling."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ace_learn.engines.signaller import HeadSignaller, HostSignals
from ace_learn.engines.vllm.device_rule import DeviceRule
from ace_learn.engines.vllm.drafted import DraftedRows, DraftedStates
from ace_learn.engines.vllm.events import ExitOptions, StepReport
from ace_learn.engines.vllm.host_rule import HostRule
from ace_learn.engines.vllm.measure import Reads, TokenLogits
from ace_learn.engines.vllm.reports import Findings, Followed
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.engines.vllm.ruling import BROKEN, Pick, Rule, Ruling, ThinkingRows
from ace_learn.engines.vllm.slots import NOWHERE
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import Signaller, check_head
from ace_learn.features.spec import FeatureSpec
from ace_learn.thinking import BoundaryTables, ThinkMarkers, closes_think, opens_think

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A step that has not been reported."""

    read: Callable[[], Findings] | None
    failures: list[tuple[str, str]]


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
            num_requests: Requests that there may be at once; a compiled step has room for no more.

        Raises:
            ValueError: The head or the policy reads what a runner cannot give, or there is no head and it is read.
        """
        check_head(policy, signaller)
        self._markers, self._family = markers, policy
        self._max_failures, self._alone, self._reports = max_failures, ranks == 1, reports
        reads = Reads.of(policy, spec)
        self.reads_aux, self.reads_logits = reads.aux, reads.entropy or reads.logprobs
        width = num_draft_tokens + 1
        self._settling = 1 << (width * (steps_in_flight + 1)).bit_length()  # behind so many, nothing is in flight
        states = None if spec is None else spec.draft
        self.drafted = None if states is None else DraftedStates(states, self._settling + states.delay)
        one_row = device.type == "cpu" and width == steps_in_flight == 1 and self.drafted is None
        asks_rarely = one_row and policy.smooth_over == "boundaries"
        if asks_rarely and (signaller is None or isinstance(signaller, HeadSignaller)):
            self._rule: Rule = HostRule(
                markers=markers,
                tables=tables,
                family=policy,
                signals=HostSignals(signaller),
                reads=reads,
                num_requests=num_requests,
            )
        else:
            self._rule = DeviceRule(
                markers=markers,
                tables=tables,
                family=policy,
                signaller=signaller,
                reads=reads,
                token_logits=token_logits,
                device=device,
                settling=self._settling,
                max_failures=max_failures,
                width=width,
                drafted=self.drafted,
                compiled=compiled,
                num_requests=num_requests,
            )
        self._requests: dict[str, Followed | None] = {}
        self._news: list[tuple[str, str]] = []
        self._pending: deque[_Pending] = deque()
        self._num_raised = self._num_broken = 0
        self._last: ThinkingRows | None = None

    @property
    def off(self) -> bool:
        """Whether the hook has failed too often in this process."""
        return self._num_raised + self._num_broken >= self._max_failures

    @property
    def num_followed(self) -> int:
        """Requests that hold a slot."""
        return self._rule.num_taken

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
        self._rule.warm_up(rows)

    def admit(self, request_id: str, prompt_ids: Sequence[int], options: ExitOptions) -> None:
        """Starts following a request; one that is known (resumed after a preemption) keeps its state."""
        if request_id in self._requests:
            return
        self._requests[request_id] = None
        if not options.exits or options.policy is None or self._family.predicate == "never":
            return
        if closes_think(prompt_ids, self._markers):
            return
        if self._rule.full:
            self._news.append((request_id, "a compiled exit rule has no room for so many requests at once"))
            return
        try:
            self._requests[request_id] = self._rule.admit(
                request_id,
                len(prompt_ids),
                options.policy,
                forces=not options.shadow,
                in_think=opens_think(prompt_ids, self._markers),
            )
        except ValueError as error:
            self._give_up([request_id], _what(error), error)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ones are ignored."""
        for request_id in request_ids:
            followed = self._requests.pop(request_id, None)
            if followed is not None:
                followed.active = False
                self._rule.drop(followed)

    def abandon(self, request_ids: Sequence[str], error: Exception) -> None:
        """Gives up the followed requests of a step whose rows could not be read; stands in for `observe`."""
        self._last = None
        picks = self._picks(request_ids)
        if picks:
            self._fail(picks, error)
        self._await_report(None)

    def observe(self, rows: StepRows) -> Int[Tensor, " R"] | None:
        """The token that must follow each row, or -1; None where no row can be forced. Never raises.

        Each call must be followed by one of `report`, in the same order.
        """
        ruling = Ruling()
        picks = self._picks(rows.request_ids)
        if picks:
            try:
                ruling = self._rule.apply(rows, picks)
            except Exception as error:  # noqa: BLE001  # the engine must outlive whatever a head does
                self._fail(picks, error)
            for failure in ruling.failures:
                self._give_up([followed.request_id for followed in failure.requests], failure.what, failure.error)
        self._last = ruling.rows
        self._await_report(ruling.read)
        return ruling.forced

    def _await_report(self, read: Callable[[], Findings] | None) -> None:
        """Notes what is to be reported of a step."""
        if self._reports:
            self._pending.append(_Pending(read, self._news))
        self._news = []

    @torch.inference_mode()
    def keep_drafted(self, request_ids: Sequence[str], read: Callable[[], DraftedRows]) -> None:
        """Keeps the states of what a drafter has run behind a step. Never raises.

        Args:
            request_ids: Of the step.
            read: Reads the states out of the runner.
        """
        picks = dict(self._picks(request_ids))
        if not picks or not isinstance(self._rule, DeviceRule):
            return
        try:
            slots = [picks[i].slot if i in picks else NOWHERE for i in range(len(request_ids))]
            self._rule.keep_drafted(read(), slots)
        except Exception as error:  # noqa: BLE001  # as in `observe`
            self._fail(list(picks.items()), error)

    def report(self) -> StepReport:
        """What the oldest step gave that has not been reported; any thread may ask.

        To be called once the step's copies to the host are done: it does not wait for them.
        """
        read, failures = self._pending.popleft()
        if read is None:
            return StepReport([], [], failures, self.off)
        found = read()
        for followed in found.broken:
            self._num_broken += 1
            failures.append((followed.request_id, BROKEN))
            self._log(followed.request_id, BROKEN)
            followed.active = followed.active and not self._alone
        for followed, since in found.over:
            self._settle(followed, since)
        return StepReport(found.exits, found.blocked, failures, self.off)

    def _picks(self, request_ids: Sequence[str]) -> list[Pick]:
        """The requests of a step to which the rule is applied."""
        if self._num_raised >= self._max_failures or (self._alone and self.off):
            return []
        picks = []
        for place, request_id in enumerate(request_ids):
            if request_id not in self._requests:
                self._requests[request_id] = None
                error = LookupError("the request has rows, but was never admitted")
                self._give_up([request_id], _what(error), error)
            followed = self._requests[request_id]
            if followed is not None and followed.active:
                picks.append((place, followed))
        return picks

    def _settle(self, followed: Followed, since: int | None) -> None:
        """Leaves a request alone once its thinking is over for good: no step in flight can take it back."""
        if since is None or followed.over_since is None:
            followed.over_since = since
        elif self._alone and since - followed.over_since >= self._settling:
            followed.active = False

    def _fail(self, picks: Sequence[Pick], error: Exception) -> None:
        """Gives up the requests of a step that failed as a whole."""
        self._give_up([followed.request_id for _, followed in picks if followed.active], _what(error), error)

    def _give_up(self, request_ids: Sequence[str], what: str, error: Exception | None) -> None:
        """Leaves requests alone from now on: one failure, be it one request's or that of all in a step."""
        self._num_raised += 1
        self._rule.count_failure()
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


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

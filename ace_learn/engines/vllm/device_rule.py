"""The exit rule where the rows are on a device, or several of a request come at once: tensors, and no look at any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ace_learn.engines.vllm.drafted import DraftedRows, DraftedStates
from ace_learn.engines.vllm.judge import STATE_SIZE, Judge, settings_of
from ace_learn.engines.vllm.measure import Meter, Reads, TokenLogits
from ace_learn.engines.vllm.reports import DevicePart, Followed, HostBuffers
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.engines.vllm.ruling import Failure, Pick, Ruling, ThinkingRows
from ace_learn.engines.vllm.slots import SlotTable, to_device
from ace_learn.engines.vllm.step import DeviceStep, Outcome
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.state import SpanMachine
from ace_learn.exit.tracker import Signaller
from ace_learn.thinking import BoundaryTables, ThinkMarkers

_WINDOW = 64
"""Positions whose state is kept at least: rejected drafts, dropped steps, and rows that are run again must fit."""


class DeviceRule:
    """Keeps the states of requests on the device, by position."""

    def __init__(
        self,
        *,
        markers: ThinkMarkers,
        tables: BoundaryTables,
        family: ExitPolicy,
        signaller: Signaller | None,
        reads: Reads,
        token_logits: TokenLogits,
        device: torch.device,
        settling: int,
        max_failures: int,
        width: int,
        drafted: DraftedStates | None,
        compiled: bool,
        num_requests: int,
    ) -> None:
        """Puts the parts together.

        Args:
            markers: Think markers of the target.
            tables: Boundary tables of the target.
            family: The server's policy.
            signaller: The head.
            reads: What is to be measured.
            token_logits: Computes one logit per row.
            device: Where the rows are.
            settling: Positions behind which nothing is in flight any more.
            max_failures: Failures after which nothing is forced any more.
            width: Rows of a request in a step at most.
            drafted: The drafter's states.
            compiled: Compile the step; `warm_up` must come first.
            num_requests: Requests that there may be at once; a compiled step has room for no more.
        """
        self._family, self._drafted, self._compiled = family, drafted, compiled
        with torch.inference_mode():
            machine = SpanMachine(markers, tables, device)
            end = torch.tensor(markers.end, device=device)
            judge = Judge(machine=machine, family=family, signaller=signaller, end=end)
            self.table = SlotTable(
                state_size=STATE_SIZE,
                num_settings=len(settings_of(family, family, prompt_length=0, forces=True)),
                window=max(_WINDOW, settling),
                device=device,
                num_requests=num_requests if compiled else 1,
            )
        meter = Meter(
            reads=reads,
            token_logits=token_logits,
            vocab_size=judge.vocab_size,
            window=settling,
            table=self.table,
            drafted=drafted,
        )
        self._step = DeviceStep(
            judge=judge, meter=meter, table=self.table, max_failures=max_failures, width=width, compiled=compiled
        )
        self._buffers = HostBuffers(device)

    @property
    def full(self) -> bool:
        """Whether the step was compiled for the requests that there are."""
        return self._compiled and self.table.full

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return self.table.num_taken

    def admit(
        self, request_id: str, prompt_length: int, policy: ExitPolicy, *, forces: bool, in_think: bool
    ) -> Followed:
        """Follows a request.

        Raises:
            ValueError: The policy is of another family than the server's.
        """
        settings = settings_of(policy, self._family, prompt_length=prompt_length, forces=forces)
        slot = self.table.take()
        self.table.admit(slot, prompt_length, settings, in_think=in_think)
        return Followed(request_id, slot, prompt_length, forces=forces)

    def drop(self, followed: Followed) -> None:
        """Frees a request's slot."""
        self.table.release(followed.slot)

    def count_failure(self) -> None:
        """Counts a failure that the host has seen."""
        self._step.count_failure()

    def warm_up(self, rows: RowTensors) -> None:
        """Compiles the step, if it is to be compiled, on two rows like all to come."""
        self._step.warm_up(rows)

    def keep_drafted(self, rows: DraftedRows, slots: Sequence[int]) -> None:
        """Keeps the states of what a drafter has run behind a step, for requests with these slots."""
        assert self._drafted is not None, "only called where something reads them"
        self._drafted.keep(rows, to_device(torch.tensor(slots), self.table.device), self.table)

    @torch.inference_mode()
    def apply(self, rows: StepRows, picks: Sequence[Pick]) -> Ruling:
        """Applies the rule to the picked requests of a step.

        Raises:
            ValueError: The rows do not fit together, or are not what the head reads.
            Exception: Whatever the head raises for all of them.
        """
        rows.check()
        self.table.flush()
        failures: list[Failure] = []
        try:
            outcome = self._step(rows, *_split(picks))
        except Exception as error:  # noqa: BLE001  # a head may fail for one request and not for another
            picks, failures = self._without_culprits(rows, picks, error)
            if not picks:
                return Ruling(failures=failures)
            outcome = self._step(rows, *_split(picks))
        return self._ruling(rows, picks, outcome, failures)

    def _ruling(self, rows: StepRows, picks: Sequence[Pick], outcome: Outcome, failures: Sequence[Failure]) -> Ruling:
        by_place = dict(picks)
        places = [place for place, _ in picks] if rows.starts is None else range(len(rows.request_ids))
        owners = [by_place.get(place) for place in places]
        forces = any(followed.forces for _, followed in picks)
        return Ruling(
            forced=outcome.forced if forces else None,
            rows=ThinkingRows(outcome.thinking, outcome.open if forces else None),
            read=DevicePart(owners, self._buffers.copy(outcome.report), self._buffers).read,
            failures=failures,
        )

    def _without_culprits(
        self, rows: StepRows, picks: Sequence[Pick], error: Exception
    ) -> tuple[list[Pick], list[Failure]]:
        """What is left of a step that failed, and the requests that fail alone too.

        Raises:
            Exception: The error, if it is nobody's alone.
        """
        if rows.starts is not None:  # the host does not know whose rows are whose
            raise error
        good: list[Pick] = []
        bad: list[Failure] = []
        attempt = self._step.attempts(rows, *_split(picks))
        for index, pick in enumerate(picks):
            try:
                attempt(index)
            except Exception as alone:  # noqa: BLE001  # whatever it is, it is this request's
                bad.append(Failure.of([pick[1]], alone))
            else:
                good.append(pick)
        if not bad:
            raise error
        return good, bad


def _split(picks: Sequence[Pick]) -> tuple[list[int], list[int]]:
    """Places in the step, and slots."""
    return [place for place, _ in picks], [followed.slot for _, followed in picks]

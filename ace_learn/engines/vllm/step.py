"""The device's part of a step: from rows to what is forced and reported, as one function that may be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._dynamo.decorators import mark_dynamic

from ace_learn.engines.vllm.judge import Judge, Judged
from ace_learn.engines.vllm.measure import Meter, Seen
from ace_learn.engines.vllm.reports import pack
from ace_learn.engines.vllm.rows import Layout, RowTensors, StepRows, plan_of
from ace_learn.engines.vllm.slots import NOWHERE, SlotTable

_FEW = 2
"""Rows and requests of a compiled step at least: a size of one would be compiled as a constant."""


class Outcome(NamedTuple):
    """What a step gave, for each of its rows."""

    forced: Int[Tensor, " R"]
    """Token that must follow, or -1."""
    thinking: Bool[Tensor, " R"]
    """Whether the next token is thought, by a request that is followed."""
    open: Bool[Tensor, " R"]
    """Those of `thinking` whose request may be forced."""
    report: Float[Tensor, "B D"]
    """What the host is to learn (`pack`)."""


class DeviceStep:
    """Advances the states of the requests of a step."""

    def __init__(
        self,
        *,
        judge: Judge,
        meter: Meter,
        table: SlotTable,
        max_failures: int,
        width: int,
        compiled: bool,
    ) -> None:
        """Puts the parts together.

        Args:
            judge: The exit rule.
            meter: Measures the rows.
            table: The states.
            max_failures: Failures after which nothing is forced any more.
            width: Rows of a request in a step at most.
            compiled: Compile it, for grids of this width; `warm_up` must come first.
        """
        self._judge, self._meter, self._table = judge, meter, table
        self._max_failures = max_failures
        self._failed = torch.zeros((), device=table.device)
        """Failures so far. Counted on the device, so that ranks agree on it whenever their reports are read."""
        self._width, self._compiled = width, compiled
        self._apply: Callable[[RowTensors, Tensor], Outcome] = self._planned
        if compiled:
            self._apply = _compiled(self, DeviceStep._planned, table.device)
        self._form: list[object] = []
        """Of the rows and the table that the step was compiled for."""
        self._latest: tuple[object, Tensor] | None = None

    @torch.inference_mode()
    def warm_up(self, rows: RowTensors) -> None:
        """Compiles the step, where it is to be compiled, on rows of nobody.

        Args:
            rows: Two, of the types and sizes that all rows will have.
        """
        if not self._compiled:
            return
        self._meter.prepare(rows)
        rows = self._uniform(rows)
        plan = torch.zeros(3, _FEW, self._width, dtype=torch.long, device=rows.tokens.device)
        for tensor in rows:
            if tensor is not None:
                mark_dynamic(tensor, 0)
        mark_dynamic(plan, 1)
        self._form = self._form_of(rows)
        self._apply(rows, plan)

    def __call__(self, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Outcome:
        """Advances the picked requests of a step, which have these slots. Whatever raises here has changed nothing.

        Raises:
            ValueError: The rows are not what the head reads, or have another form than those of `warm_up`.
        """
        tensors, size = rows.tensors(), len(rows.tokens)
        self._meter.prepare(tensors)
        if not self._compiled:
            return self._advance(tensors, Layout.of(rows, picks, slots))
        tensors = self._uniform(tensors)
        if self._form_of(tensors) != self._form:
            raise ValueError(f"the step was compiled for {self._form}, not {self._form_of(tensors)}")
        outcome = self._apply(tensors, self._plan(rows, picks, slots))
        forced, thinking, open_, report = outcome
        return Outcome(forced[:size], thinking[:size], open_[:size], report)

    def attempts(self, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Callable[[int], object]:
        """Judges one of the picked requests alone, to see whether that raises.

        Raises:
            ValueError: At once, what is wrong with the rows of all.
        """
        tensors = rows.tensors()
        self._meter.prepare(tensors)
        seen = self._see(tensors, Layout.planned(plan_of(rows, picks, slots, int(rows.counts.max()))))
        return lambda index: self._judge(seen.request(index), self._table)

    def _plan(self, rows: StepRows, picks: Sequence[int], slots: Sequence[int]) -> Int[Tensor, "3 B W"]:
        """Where the rows of the picked requests are; often as in the step before."""
        if rows.starts is not None:
            return plan_of(rows, picks, slots, self._width, height=_FEW)
        key = (rows.counts.tobytes(), *picks, *slots)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, plan_of(rows, picks, slots, self._width, height=_FEW)
        return self._latest[1]

    def _uniform(self, rows: RowTensors) -> RowTensors:
        """The rows as there is one graph for: two or more, contiguous, with a grammar, and with `aux` if it is read."""
        if len(rows.tokens) < _FEW:
            rows = rows.map(lambda field: torch.cat((field, field)))
        allowed = rows.allowed
        if allowed is None:
            allowed = torch.ones(len(rows.tokens), len(self._judge.end), dtype=torch.bool, device=rows.tokens.device)
        whole = rows._replace(tokens=rows.tokens.long(), positions=rows.positions.long(), allowed=allowed)
        return whole._replace(aux=rows.aux if self._meter.reads.aux else None).map(Tensor.contiguous)

    def _form_of(self, rows: RowTensors) -> list[object]:
        """What must be as it was when the step was compiled."""
        return [len(self._table.settings), *(field is not None and (field.dtype, *field.shape[1:]) for field in rows)]

    def count_failure(self) -> None:
        """Counts a failure that the host has seen."""
        self._failed += 1

    def _planned(self, rows: RowTensors, plan: Int[Tensor, "3 B W"]) -> Outcome:
        for field in rows:  # a compiler then knows one size, where it would pass five
            torch._check(field is None or len(field) == len(rows.tokens))
        return self._advance(rows, Layout.planned(plan))

    def _advance(self, rows: RowTensors, layout: Layout) -> Outcome:
        seen = self._see(rows, layout)
        judged, grid = self._judge(seen, self._table), seen.grid
        slots = torch.where(judged.known, grid.slots[:, None], NOWHERE)
        self._table.states.store(slots.flatten(), grid.positions.flatten(), judged.states.flatten(0, 1))
        self._meter.keep(grid, judged.known)
        judged, broken = self._count(grid.slots, judged)
        thinking, size = judged.thinking(), len(rows.tokens)
        return Outcome(
            forced=layout.spread(judged.forced, size),
            thinking=layout.spread(thinking.long(), size) > 0,
            open=layout.spread((thinking & judged.forces[:, None]).long(), size) > 0,
            report=pack(judged, grid.positions, broken),
        )

    def _see(self, rows: RowTensors, layout: Layout) -> Seen:
        """What the rule reads of the rows."""
        grid = self._meter.read(rows, layout)
        return Seen(grid, self._meter.follow(grid))

    def _count(self, slots: Int[Tensor, " B"], judged: Judged) -> tuple[Judged, Bool[Tensor, " B"]]:
        """Counts requests whose signals are NaN, once each; after too many failures nothing is forced any more."""
        counted = self._table.counted[slots]
        broken = judged.broken & ~counted
        self._table.counted[slots] = counted | broken
        self._failed += broken.sum()
        on = self._failed < self._max_failures
        fired, blocked = judged.fired & on, judged.blocked & on
        return judged._replace(forced=torch.where(on, judged.forced, -1), fired=fired, blocked=blocked), broken


def _compiled(
    owner: DeviceStep, function: Callable[[DeviceStep, RowTensors, Tensor], Outcome], device: torch.device
) -> Callable[[RowTensors, Tensor], Outcome]:
    """A method of one object, compiled at its first call for all later ones.

    Dynamo checks nothing again, since its checks would take as long as the work: what differs between calls is in
    tensors of one form. It keeps graphs by code object, so that this method, whose graph holds for its owner alone,
    needs one of its own.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options: dict[str, str | int | bool | Callable[..., object]] = {}
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    options["emulate_precision_casts"] = True  # a logit that is rounded to the layer's type stays rounded
    options["cpp_wrapper"] = device.type == "cpu"  # calls the kernels from C++, which saves a third of the time
    return torch.compile(MethodType(own, owner), fullgraph=True, options=options)

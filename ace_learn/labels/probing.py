"""From a batch of problems to labelled traces and feature rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ace_learn.engines.capture import CapturedRows, CaptureRows
from ace_learn.engines.hf import Branch, HFEngine, Rollouts
from ace_learn.engines.requests import Output, Request
from ace_learn.labels.records import TraceRecord, answer_text
from ace_learn.labels.targets import Minimal, minimal_boundary, targets
from ace_learn.models.target import Target
from ace_learn.tasks.base import Example
from ace_learn.tasks.chat import render_prompt


class Problem(NamedTuple):
    """One problem of a build."""

    number: int
    split: str
    prompt: str
    example: Example
    request: Request
    no_think: Request


class Labelled(NamedTuple):
    """A labelled batch."""

    records: list[TraceRecord]
    rows: dict[str, Tensor]
    """Feature rows, targets and indices, without the split column."""
    trace_tokens: int
    """Tokens run through the target for the traces (prompts included)."""
    probe_tokens: int
    """Tokens run through the target for the probes."""


class _Boundary(NamedTuple):
    request: int
    position: int
    confidence: float
    length: int
    """Output tokens up to and including the boundary."""


def as_problem(
    number: int,
    split: str,
    example: Example,
    target: Target,
    *,
    max_new_tokens: int,
    max_answer_tokens: int,
    plain: bool = False,
) -> Problem:
    """An example as a problem of a build: its request with thinking, and the one without.

    Raises:
        ValueError: The target's chat template cannot render it.
    """

    def prompt(*, thinking: bool) -> tuple[int, ...]:
        return tuple(
            render_prompt(target.tokenizer, example.messages, thinking=thinking, markers=target.markers, plain=plain)
        )

    request = Request(
        key=number,
        prompt_ids=prompt(thinking=True),
        contract=example.contract,
        max_new_tokens=max_new_tokens,
        max_answer_tokens=max_answer_tokens,
    )
    no_think = Request(
        key=number,
        prompt_ids=prompt(thinking=False),
        contract=example.contract,
        thinking=False,
        max_new_tokens=max_answer_tokens,
    )
    shown = "\n".join(message["content"] for message in example.messages)
    return Problem(number, split, shown, example, request, no_think)


def label_batch(engine: HFEngine, problems: Sequence[Problem], *, rows: CaptureRows, minimal: Minimal) -> Labelled:
    """Runs, probes and labels one batch.

    Every boundary of every trace is probed, except one that stands right before the think end: that exit *is* the
    natural end.
    """
    before = engine.forward_tokens
    rollouts = engine.rollout([problem.request for problem in problems], rows)
    after_traces = engine.forward_tokens
    boundaries = _boundaries(rollouts)
    probes = _probe(engine, rollouts, [b for group in boundaries for b in group])
    after_probes = engine.forward_tokens
    no_think = engine.generate([problem.no_think for problem in problems])
    records = [
        _record(problem, output, group, [probes[b] for b in group], without, len(engine.target.markers.end))
        for problem, output, group, without in zip(problems, rollouts.outputs, boundaries, no_think, strict=True)
    ]
    columns = _rows(rollouts.rows, records, minimal)
    return Labelled(records, columns, after_traces - before, after_probes - after_traces)


def _usable(output: Output) -> bool:
    return output.think_start is not None and output.think_end is not None


def _boundaries(rollouts: Rollouts) -> list[list[_Boundary]]:
    """Boundaries of each trace's first think span; none where the trace is unusable."""
    found: list[list[_Boundary]] = [[] for _ in rollouts.outputs]
    closed = rollouts.rows.select(rollouts.rows.closed)
    for request, index, position, confidence in zip(
        closed.request.tolist(),
        closed.output_index.tolist(),
        closed.position.tolist(),
        closed.confidence.tolist(),
        strict=True,
    ):
        output = rollouts.outputs[request]
        if _usable(output) and output.think_end is not None and index < output.think_end:
            found[request].append(_Boundary(request, position, confidence, index + 1))
    return found


def _probe(engine: HFEngine, rollouts: Rollouts, boundaries: Sequence[_Boundary]) -> dict[_Boundary, Output]:
    natural = {b: rollouts.outputs[b.request] for b in boundaries if rollouts.outputs[b.request].think_end == b.length}
    asked = sorted((b for b in boundaries if b not in natural), key=lambda b: b.length)
    answered = engine.branch(rollouts, [Branch(b.request, b.length) for b in asked])
    return natural | dict(zip(asked, answered, strict=True))


def _record(
    problem: Problem,
    full: Output,
    boundaries: Sequence[_Boundary],
    probes: Sequence[Output],
    no_think: Output,
    end_length: int,
) -> TraceRecord:
    contract, gold, correct = problem.example.contract, problem.example.gold, problem.example.correct
    matches = [contract.equal(probe.answer, full.answer) for probe in probes]
    best = minimal_boundary(matches)
    return TraceRecord(
        problem=problem.number,
        family=problem.example.family,
        split=problem.split,
        prompt=problem.prompt,
        contract=answer_text(contract.to_spec()) or "",
        gold=answer_text(gold),
        excluded=not _usable(full),
        prompt_ids=list(problem.request.prompt_ids),
        token_ids=list(full.token_ids),
        think_start=-1 if full.think_start is None else full.think_start,
        think_end=-1 if full.think_end is None else full.think_end,
        full_answer=answer_text(full.answer),
        full_correct=correct(full.answer),
        full_tokens=len(full.token_ids),
        no_think_answer=answer_text(no_think.answer),
        no_think_correct=correct(no_think.answer),
        no_think_tokens=len(no_think.token_ids),
        no_think_token_ids=list(no_think.token_ids),
        boundary=[b.position for b in boundaries],
        probe_answer=[answer_text(probe.answer) for probe in probes],
        probe_matches=matches,
        probe_correct=[correct(probe.answer) for probe in probes],
        probe_tokens=[len(probe.token_ids) for probe in probes],
        probe_token_ids=[
            list(probe.token_ids[b.length + end_length :]) for probe, b in zip(probes, boundaries, strict=True)
        ],
        boundary_confidence=[b.confidence for b in boundaries],
        first=best.first,
        stable=best.stable,
    )


def _rows(captured: CapturedRows, records: Sequence[TraceRecord], minimal: Minimal) -> dict[str, Tensor]:
    """Feature rows of the usable traces' first think spans, with their targets."""
    length = torch.tensor([-1 if record.excluded else record.think_end for record in records])
    rows = captured.select(captured.output_index < length[captured.request])
    boundary, target = [], []
    for i, record in enumerate(records):
        mine = rows.select(rows.request == i)
        number = {position: n for n, position in enumerate(record.boundary)}
        index = torch.tensor([number.get(p, -1) for p in mine.position.tolist()], dtype=torch.long)
        best = record.first if minimal == "first" else record.stable
        end = record.think_end - record.think_start - 1
        boundary.append(index)
        target.append(
            targets(
                position=mine.position,
                confidence=mine.confidence,
                boundary=index,
                matches=record.probe_matches,
                minimal_position=record.boundary[best] if best < len(record.boundary) else max(0, end),
            )
        )
    problem = torch.tensor([record.problem for record in records])
    columns = {
        "target_last": rows.last,
        "scalars": rows.scalars.float(),
        "targets": torch.cat(target),
        "trace": problem[rows.request],
        "position": rows.position,
        "boundary": torch.cat(boundary),
    }
    return columns | ({"target_aux": rows.aux} if rows.aux.shape[1] else {})

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
from ace_learn.labels.strategy import ProbingConfig, Strategy, conclude, questions, sample_key
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
    naive_probe_tokens: int
    """Tokens that the probes would have cost if each had run its prefix again."""


class _Boundary(NamedTuple):
    request: int
    number: int
    """Index among the trace's boundaries."""
    position: int
    confidence: float
    length: int
    """Output tokens up to and including the boundary."""


class _Probes(NamedTuple):
    """What is known of one trace's boundaries."""

    samples: list[list[Output]]
    """Runs that exit at each boundary, the first with the noise of a live exit; none where nobody asked."""
    matches: list[bool | None]


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


def label_batch(
    engine: HFEngine,
    problems: Sequence[Problem],
    *,
    rows: CaptureRows,
    minimal: Minimal,
    probing: ProbingConfig | None = None,
) -> Labelled:
    """Runs, probes and labels one batch.

    A boundary that stands right before the think end is never probed: that exit *is* the natural end.

    Args:
        engine: Runs the target.
        problems: The batch.
        rows: Which tokens get a feature row.
        minimal: Which boundary is b*.
        probing: How the train problems among them are probed; None: at every boundary.
    """
    before = engine.forward_tokens
    rollouts = engine.rollout([problem.request for problem in problems], rows)
    after_traces = engine.forward_tokens
    boundaries = _boundaries(rollouts)
    probes = _probe(engine, rollouts, problems, boundaries, probing or ProbingConfig())
    after_probes = engine.forward_tokens
    no_think = engine.generate([problem.no_think for problem in problems])
    records = [
        _record(problem, output, group, probed, without, len(engine.target.markers.end))
        for problem, output, group, probed, without in zip(
            problems, rollouts.outputs, boundaries, probes, no_think, strict=True
        )
    ]
    return Labelled(
        records=records,
        rows=_rows(rollouts.rows, records, minimal),
        trace_tokens=after_traces - before,
        probe_tokens=after_probes - after_traces,
        naive_probe_tokens=sum(
            len(problem.request.prompt_ids) + len(output.token_ids)
            for problem, probed in zip(problems, probes, strict=True)
            for outputs in probed.samples
            for output in outputs
        ),
    )


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
            found[request].append(_Boundary(request, len(found[request]), position, confidence, index + 1))
    return found


def _probe(
    engine: HFEngine,
    rollouts: Rollouts,
    problems: Sequence[Problem],
    boundaries: Sequence[Sequence[_Boundary]],
    probing: ProbingConfig,
) -> list[_Probes]:
    """Asks in rounds over all traces, until no strategy has a question left."""
    strategies = [probing.strategy_of(problem.number, problem.split) for problem in problems]
    probed = [
        _begin(full, group, problem, strategy)
        for full, group, problem, strategy in zip(rollouts.outputs, boundaries, problems, strategies, strict=True)
    ]
    while asked := [
        boundaries[trace][i]
        for trace, strategy in enumerate(strategies)
        for i in questions(strategy, probed[trace].matches)
    ]:
        asked.sort(key=lambda boundary: boundary.length)  # so that the forks of a chunk are about as long
        _ask(engine, rollouts, problems, asked, probing, probed)
    return [
        probes._replace(matches=conclude(strategy, probes.matches))
        for strategy, probes in zip(strategies, probed, strict=True)
    ]


def _begin(full: Output, boundaries: Sequence[_Boundary], problem: Problem, strategy: Strategy) -> _Probes:
    """What is known without a probe: the natural end, and that an absent answer matches nothing."""
    equal = problem.example.contract.equal
    samples = [[full] if boundary.length == full.think_end else [] for boundary in boundaries]
    matches: list[bool | None] = [equal(outputs[0].answer, full.answer) if outputs else None for outputs in samples]
    if full.answer is None and strategy != "all":
        matches = [False] * len(boundaries)
    return _Probes(samples, matches)


def _ask(
    engine: HFEngine,
    rollouts: Rollouts,
    problems: Sequence[Problem],
    asked: Sequence[_Boundary],
    probing: ProbingConfig,
    probed: Sequence[_Probes],
) -> None:
    """Probes some boundaries and notes the answers; the live sample says whether a boundary matches."""
    branches = [
        Branch(boundary.request, boundary.length, key=sample_key(problem.number, sample))
        for boundary in asked
        for problem in (problems[boundary.request],)
        for sample in range(probing.samples_of(problem.split))
    ]
    outputs = iter(engine.branch(rollouts, branches))
    for boundary in asked:
        problem, full = problems[boundary.request], rollouts.outputs[boundary.request]
        samples = [next(outputs) for _ in range(probing.samples_of(problem.split))]
        samples_of, matches = probed[boundary.request]
        samples_of[boundary.number] = samples
        matches[boundary.number] = problem.example.contract.equal(samples[0].answer, full.answer)


def _record(
    problem: Problem,
    full: Output,
    boundaries: Sequence[_Boundary],
    probes: _Probes,
    no_think: Output,
    end_length: int,
) -> TraceRecord:
    contract, gold, correct = problem.example.contract, problem.example.gold, problem.example.correct
    live = [outputs[0] if outputs else None for outputs in probes.samples]
    best = minimal_boundary(probes.matches)
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
        probe_answer=[answer_text(probe.answer) if probe else None for probe in live],
        probe_matches=probes.matches,
        probe_correct=[correct(probe.answer) if probe else None for probe in live],
        probe_tokens=[len(probe.token_ids) if probe else None for probe in live],
        probe_token_ids=[
            list(probe.token_ids[b.length + end_length :]) if probe else None
            for probe, b in zip(live, boundaries, strict=True)
        ],
        boundary_confidence=[b.confidence for b in boundaries],
        first=best.first,
        stable=best.stable,
        probe_asked=[bool(outputs) for outputs in probes.samples],
        probe_match_rate=_match_rate(problem, full, probes),
    )


def _match_rate(problem: Problem, full: Output, probes: _Probes) -> list[float | None]:
    equal = problem.example.contract.equal
    rates: list[float | None] = [None if match is None else float(match) for match in probes.matches]
    for i, outputs in enumerate(probes.samples):
        if outputs:
            rates[i] = sum(equal(output.answer, full.answer) for output in outputs) / len(outputs)
    return rates


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
                match_rate=record.probe_match_rate,
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
    optional = {
        "target_aux": rows.aux,
        "candidates": rows.candidates,
        "draft": rows.draft,
        "acceptance": rows.acceptance.float(),
    }
    return columns | {name: column for name, column in optional.items() if column.shape[1]}

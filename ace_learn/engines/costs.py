"""What a step costs on this machine, measured before the first request."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ace_learn.models.target import Target
from ace_learn.speculation.adaptive import CostTables
from ace_learn.speculation.drafters import Drafter

_REPEATS = 3
_CONTEXT = 256
"""Tokens in front of the measured step."""


def measure_costs(target: Target, drafter: Drafter, *, batch_size: int, draft_tokens: int) -> CostTables:
    """Times the target's forward and the drafter for batches of several sizes.

    The engine runs every row of a batch to the longest one, so that the tables are `padded`.

    Args:
        target: The model that verifies.
        drafter: What drafts.
        batch_size: Largest batch.
        draft_tokens: K.
    """
    context = min(_CONTEXT, target.context_length - 2 * (draft_tokens + 1))
    sizes = list(_powers(batch_size))
    verify: dict[int, list[float]] = {}
    for batch in sizes:
        cache = target.new_cache(batch)
        for width in sorted({1, 2, *_powers(draft_tokens + 1)}):
            tokens = torch.zeros(batch, width, dtype=torch.long, device=target.device)
            positions = context + torch.arange(width, device=target.device).expand(batch, -1)

            step = partial(target.forward, tokens, positions, cache, longest=context + width)
            verify.setdefault(batch * width, []).append(_milliseconds(step, target.device))
    return CostTables.from_curves(
        [(batch, _draft_cost(target, drafter, batch, context, draft_tokens)) for batch in sizes],
        [(size, min(times)) for size, times in verify.items()],
        most_requests=batch_size,
        most_tokens=batch_size * (draft_tokens + 1),
        padded=True,
    )


def _draft_cost(target: Target, drafter: Drafter, batch: int, context: int, draft_tokens: int) -> float:
    """Milliseconds of one draft that follows another, as in decoding."""
    session = drafter.start(torch.arange(batch, device=target.device))
    cache = target.new_cache(batch)
    sequences = [[0] * context for _ in range(batch)]
    times = []
    start = 0
    for _ in range(_REPEATS + 1):
        length = len(sequences[0])
        positions = torch.arange(start, length, device=target.device).expand(batch, -1)
        outputs = target.forward(torch.zeros_like(positions), positions, cache, longest=length, aux_layers=drafter.taps)
        session.observe(positions, outputs.aux, longest=length)
        for ids in sequences:
            ids.append(0)
        times.append(_once(partial(session.draft, sequences, [draft_tokens] * batch), target.device))
        start = length
    return statistics.median(times[1:])


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of a few runs, the first left out."""
    return statistics.median([_once(work, device) for _ in range(_REPEATS + 1)][1:])


def _once(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _powers(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and the largest itself."""
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest

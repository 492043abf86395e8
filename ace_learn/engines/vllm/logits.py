"""What is done to the logits of a step, in place and without asking the device: forced tokens and stop tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

FORCED_LOGIT = 1e30
"""Outweighs every other logit, so that the softmax is exactly one-hot at any temperature that vLLM accepts."""
_GREEDY = 1e-5
"""Temperatures up to this one are greedy, as in vLLM."""
_NOTHING = 17.0
"""Nats by which a logit must be lower to add nothing to another that float32 could tell."""


def force_tokens(logits: Float[Tensor, "R V"], forced: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Makes `forced` the only likely token of its row, in place; rows with -1 stay as they are.

    One logit per row is written instead of the others being masked: that costs R writes, not R x V.
    """
    column = forced.clamp_min(0)[:, None]
    value = torch.where(forced[:, None] >= 0, FORCED_LOGIT, logits.gather(1, column))
    return logits.scatter_(1, column, value)


def stops_to_end(
    logits: Float[Tensor, "R V"],
    rows: Bool[Tensor, " R"],
    temperature: Float[Tensor, " R"],
    ends: Int[Tensor, " S"],
) -> Float[Tensor, "R V"]:
    """Gives the probability of stop tokens to the think end, in place.

    Where the thinking would end the request without an answer, it ends the thinking instead. A row in which the think
    end is forbidden is left alone.

    Args:
        logits: Before temperature and truncation.
        rows: Rows whose next token is thought.
        temperature: Of each row; 0 is greedy.
        ends: The think end, one token, and then the tokens that end a request.
    """
    if logits.device.type == "cpu":
        _stops_on_host(logits.numpy(), rows.tolist(), temperature.tolist(), ends.tolist())
    else:
        stops_on_device(logits, rows, temperature, ends)
    return logits


def stops_on_device(
    logits: Float[Tensor, "R V"],
    rows: Bool[Tensor, " R"],
    temperature: Float[Tensor, " R"],
    ends: Int[Tensor, " S"],
) -> None:
    """`stops_to_end` without a look at any value."""
    every = logits[:, ends]
    sampled = temperature * (every / temperature[:, None].clamp_min(_GREEDY)).logsumexp(-1)
    merged = torch.full_like(every, -torch.inf)
    merged[:, 0] = torch.where(temperature > _GREEDY, sampled, every.amax(-1))
    moves = rows & (every[:, 0] > -torch.inf)
    logits[:, ends] = torch.where(moves[:, None], merged, every)


def _stops_on_host(
    logits: Float[np.ndarray, "R V"], rows: Sequence[bool], temperature: Sequence[float], ends: Sequence[int]
) -> None:
    """The same where a call of torch would cost several times its arithmetic."""
    end, *stops = (logits[:, token].tolist() for token in ends)
    for row, (moves, scale, own, others) in enumerate(
        zip(rows, temperature, end, zip(*stops, strict=True), strict=True)
    ):
        if not (moves and own > -math.inf):
            continue
        if max(others) > own - _NOTHING * scale:
            end[row] = _merged((own, *others), scale)
        for column in stops:
            column[row] = -math.inf
    for token, column in zip(ends, (end, *stops), strict=True):
        logits[:, token] = column


def _merged(logits: Sequence[float], temperature: float) -> float:
    """The logit whose weight at this temperature is that of all of them."""
    most = max(logits)
    if temperature <= _GREEDY or most == math.inf:
        return most
    return most + temperature * math.log(sum(math.exp((logit - most) / temperature) for logit in logits))


def allowed_ends(
    grammar: GrammarOutput | None,
    request_ids: Sequence[str],
    counts: Int[np.ndarray, " B"],
    end: tuple[int, ...],
    *,
    drafts: Mapping[str, Sequence[int]] | None = None,
) -> Bool[np.ndarray, "B Q E"] | None:
    """Whether the grammar allows each token of the think end after each row of each request.

    Args:
        grammar: Bit masks of the requests with structured output, a row of 32-bit words per logits row.
        request_ids: B requests in the order of the batch.
        counts: Scheduled rows of each; Q is the most.
        end: The think end, E tokens.
        drafts: Scheduled drafts of every request, those included that are not in the batch.

    Returns:
        True as well where there is no grammar or no such row; None without any grammar.
    """
    if grammar is None or not grammar.structured_output_request_ids:
        return None
    places = {request_id: b for b, request_id in enumerate(request_ids)}
    allowed = np.ones((len(places), int(counts.max()), len(end)), dtype=bool)
    bits = np.stack([grammar.grammar_bitmask[:, token // 32] >> (token % 32) & 1 for token in end], axis=-1) != 0
    first = 0
    for request_id in grammar.structured_output_request_ids:
        b = places.get(request_id)
        rows = int(counts[b]) if b is not None else 1 + len((drafts or {}).get(request_id, ()))
        if b is not None:
            allowed[b, :rows] = bits[first : first + rows]
        first += rows
    return allowed

"""What is done to the logits of a step, in place and without asking the device: forced tokens and stop tokens."""

from __future__ import annotations

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
    *,
    stop_ids: Int[Tensor, " S"],
    end: int,
) -> Float[Tensor, "R V"]:
    """Gives the probability of stop tokens to the think end, in place.

    Where the thinking would end the request without an answer, it ends the thinking instead. A row in which the think
    end is forbidden is left alone.

    Args:
        logits: Before temperature and truncation.
        rows: Rows whose next token is thought.
        temperature: Of each row; 0 is greedy.
        stop_ids: Tokens that end a request.
        end: The think end, one token.
    """
    if logits.device.type == "cpu":
        _stops_on_host(logits.numpy(), rows.numpy(), temperature.numpy(), stop_ids.numpy(), end)
    else:
        stops_on_device(logits, rows, temperature, stop_ids, end)
    return logits


def stops_on_device(
    logits: Float[Tensor, "R V"],
    rows: Bool[Tensor, " R"],
    temperature: Float[Tensor, " R"],
    stop_ids: Int[Tensor, " S"],
    end: int,
) -> None:
    """`stops_to_end` without a look at any value."""
    own, stops = logits[:, end], logits[:, stop_ids]
    every = torch.cat((own[:, None], stops), dim=-1)
    scale = temperature[:, None].clamp_min(_GREEDY)
    sampled = temperature * (every / scale).logsumexp(-1)
    merged = torch.where(temperature > _GREEDY, sampled, every.amax(-1))
    moves = rows & (own > -torch.inf)
    logits[:, end] = torch.where(moves, merged, own)
    logits[:, stop_ids] = torch.where(moves[:, None], -torch.inf, stops)


def _stops_on_host(
    logits: Float[np.ndarray, "R V"],
    rows: Bool[np.ndarray, " R"],
    temperature: Float[np.ndarray, " R"],
    stop_ids: Int[np.ndarray, " S"],
    end: int,
) -> None:
    """The same where a call of torch would cost several times its arithmetic."""
    (moves,) = np.nonzero(rows & (logits[:, end] > -np.inf))
    ids = np.append(stop_ids, end)
    every, own = logits[moves[:, None], ids], temperature[moves]
    most = every.max(1)
    shares = np.exp((every - most[:, None]) / np.maximum(own, _GREEDY)[:, None])
    logits[moves[:, None], ids] = -np.inf
    logits[moves, end] = np.where(own > _GREEDY, most + own * np.log(shares.sum(1)), most)


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

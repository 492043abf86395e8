"""Replay: what a run would have produced had it stopped thinking at a stored boundary."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from ace_learn.evaluate.traces import Traces

_CHUNK_CELLS = 1 << 24
"""Most cells of a [G, n, P] intermediate held at once."""


class Replayed(NamedTuple):
    """Per-problem results of a replay, each `[*grid, n]`.

    Attributes:
        tokens: all output tokens, think and answer.
        think_tokens: tokens thought.
        valid: an answer was committed.
        correct: the answer equals gold.
        matches: the answer equals the full answer.
        lost_correct: the full answer is correct and this one is not.
        mismatch: the run exited early with an answer other than the full one.
    """

    tokens: Int[ndarray, "*grid n"]
    think_tokens: Int[ndarray, "*grid n"]
    valid: Bool[ndarray, "*grid n"]
    correct: Bool[ndarray, "*grid n"]
    matches: Bool[ndarray, "*grid n"]
    lost_correct: Bool[ndarray, "*grid n"]
    mismatch: Bool[ndarray, "*grid n"]

    def at(self, index: int | Int[ndarray, " C"]) -> "Replayed":
        """Results of one grid point, each `[n]`, or of some, each `[C, n]`."""
        return Replayed(*(field[index] for field in self))


def replay(traces: Traces, exit_index: Int[ndarray, "*grid n"]) -> Replayed:
    """Look up the results of exiting trace i at boundary `exit_index[..., i]`.

    Args:
        traces: n stored traces.
        exit_index: in 0..num_boundaries; num_boundaries is the natural end.

    Raises:
        ValueError: an exit index lies outside its trace.
    """
    if np.any(exit_index < 0) or np.any(exit_index > traces.num_boundaries):
        raise ValueError("exit_index must lie in 0..num_boundaries of its trace")
    rows = np.arange(traces.num_problems)
    correct = traces.correct_at[rows, exit_index]
    matches = traces.matches_at[rows, exit_index]
    return Replayed(
        tokens=traces.tokens_at[rows, exit_index],
        think_tokens=traces.think_tokens_at[rows, exit_index],
        valid=traces.valid_at[rows, exit_index],
        correct=correct,
        matches=matches,
        lost_correct=np.logical_and(traces.full_correct, np.logical_not(correct)),
        mismatch=np.logical_and(exit_index < traces.num_boundaries, np.logical_not(matches)),
    )


def replay_no_think(traces: Traces) -> Replayed:
    """Results of the runs that never thought."""
    correct = traces.no_think_correct
    return Replayed(
        tokens=traces.no_think_tokens,
        think_tokens=np.zeros(traces.num_problems, dtype=np.int64),
        valid=traces.no_think_valid,
        correct=correct,
        matches=traces.no_think_matches,
        lost_correct=np.logical_and(traces.full_correct, np.logical_not(correct)),
        mismatch=np.logical_not(traces.no_think_matches),
    )


def held(fires: Bool[ndarray, "*grid n P"], patience: int) -> Bool[ndarray, "*grid n P"]:
    """True where the predicate held at this boundary and at the `patience - 1` before it."""
    assert patience >= 1
    out = fires.copy()
    for lag in range(1, patience):
        out[..., lag:] &= fires[..., :-lag]
    out[..., : patience - 1] = False
    return out


def first_fire(fires: Bool[ndarray, "*grid n P"], num_boundaries: Int[ndarray, " n"]) -> Int[ndarray, "*grid n"]:
    """Index of the first boundary that fires; `num_boundaries`, the natural end, where none does.

    Args:
        fires: whether the exit rule fires at each boundary; columns past `num_boundaries` are ignored.
        num_boundaries: boundaries of each trace.
    """
    real = np.logical_and(fires, np.arange(fires.shape[-1]) < num_boundaries[:, None])
    index = np.argmax(real, axis=-1) if fires.shape[-1] else np.zeros(fires.shape[:-1], dtype=np.int64)
    return np.asarray(np.where(np.any(real, axis=-1), index, num_boundaries))


def exit_scores(
    score: Float[ndarray, "n P"], traces: Traces, *, patience: int = 1, min_thinking_tokens: int = 0
) -> Float[ndarray, "n P"]:
    """Fold patience, the minimum length and padding into a score, so that exit = first boundary above a threshold.

    The score of `patience` consecutive boundaries is above a threshold exactly when their minimum is. The minimum
    length only gates the exit: boundaries before it still count towards the patience, as in the live rule.
    """
    held_score = np.where(np.isnan(score), -np.inf, score)
    raw = held_score.copy()
    for lag in range(1, patience):
        held_score[:, lag:] = np.minimum(held_score[:, lag:], raw[:, :-lag])
    held_score[:, : patience - 1] = -np.inf
    allowed = np.logical_and(traces.is_boundary, traces.boundary + 1 >= min_thinking_tokens)
    return np.where(allowed, held_score, -np.inf)


def threshold_exits(
    score: Float[ndarray, "n P"], thresholds: Float[ndarray, " G"], num_boundaries: Int[ndarray, " n"]
) -> Int[ndarray, "G n"]:
    """Exit indices of "first boundary whose score is above the threshold", for a whole grid of thresholds.

    Args:
        score: from `exit_scores`: -inf wherever an exit is not allowed.
        thresholds: G thresholds, in any order.
        num_boundaries: boundaries of each trace.
    """
    running = np.maximum.accumulate(score, axis=1)
    out = np.empty((thresholds.shape[0], score.shape[0]), dtype=np.int64)
    step = max(1, _CHUNK_CELLS // max(1, score.size))
    for start in range(0, thresholds.shape[0], step):
        part = thresholds[start : start + step, None, None]
        out[start : start + step] = np.sum(running <= part, axis=-1)
    return np.asarray(np.minimum(out, num_boundaries))

"""Drafters: what proposes the next tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Drafter(Protocol):
    """A deterministic drafter on the host."""

    def propose(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that may follow `ids`; fewer, or none, where it has no idea."""
        ...


class NgramDrafter:
    """Prompt lookup: continues the latest earlier occurrence of the longest matching suffix.

    The search is over the prompt and the output so far, longest n-gram first (Saxena 2023, "prompt lookup decoding").
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, max_context: int = 4096) -> None:
        """Sets the sizes.

        Args:
            max_ngram: Longest suffix looked up.
            min_ngram: Shortest suffix looked up.
            max_context: Only the newest tokens are searched, so that a step's cost does not grow with the trace.

        Raises:
            ValueError: The sizes are not 1 <= min_ngram <= max_ngram < max_context.
        """
        if not 1 <= min_ngram <= max_ngram < max_context:
            raise ValueError(
                f"need 1 <= min_ngram <= max_ngram < max_context, not {min_ngram}, {max_ngram}, {max_context}"
            )
        self.max_ngram, self.min_ngram, self.max_context = max_ngram, min_ngram, max_context

    def propose(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Continuation of the latest match of the longest suffix; empty without a match."""
        context = np.asarray(ids[-self.max_context :])
        if len(context) < 2:
            return []
        matches = np.flatnonzero(context[:-1] == context[-1])  # where a suffix of width 1 ends again
        found = matches if self.min_ngram == 1 else matches[:0]
        for width in range(2, min(self.max_ngram, len(context) - 1) + 1):
            matches = matches[matches >= width - 1]
            matches = matches[context[matches - width + 1] == context[-width]]
            if not len(matches):
                break
            if width >= self.min_ngram:
                found = matches
        if not len(found):
            return []
        start = int(found[-1]) + 1
        continuation: list[int] = context[start : start + num_tokens].tolist()
        return continuation

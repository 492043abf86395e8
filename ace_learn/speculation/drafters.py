"""Drafters: what proposes the next tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


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
        context = list(ids[-self.max_context :])
        for width in range(min(self.max_ngram, len(context) - 1), self.min_ngram - 1, -1):
            suffix = context[-width:]
            for start in range(len(context) - width - 1, -1, -1):
                if context[start : start + width] == suffix:
                    return context[start + width : start + width + num_tokens]
        return []

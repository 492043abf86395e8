"""Which paragraph ends are probed, and what is concluded for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["all", "bisect", "first"]

_SAMPLE_BITS = 40
"""Noise keys of further samples differ from the problem numbers in the bits above these."""


@dataclass(frozen=True, kw_only=True)
class ProbingConfig:
    """How the train split is probed; the other splits are replayed, so every boundary of theirs is probed, once."""

    strategy: Strategy = "all"
    """`all` boundaries; `bisect` for the first that matches, as if all later ones matched too; from the front until the
    `first` that matches, which leaves the later ones unknown."""
    samples: int = 1
    """Probes per boundary, each with noise of its own; `consistency` becomes the share of them that match."""
    audit: float = 0.0
    """Share of the train problems that are probed at all boundaries nevertheless, to measure what the strategy gets
    wrong."""

    def __post_init__(self) -> None:
        """Checks ranges, and that the audit has something to measure."""
        if self.samples < 1 or not 0.0 <= self.audit <= 1.0:
            raise ValueError(
                f"probing needs samples >= 1 and 0 <= audit <= 1, not samples {self.samples} and audit {self.audit}"
            )
        if self.audit > 0 and self.strategy == "all":
            raise ValueError("the strategy `all` probes every boundary; set probing.audit 0, or choose bisect or first")

    def strategy_of(self, number: int, split: str) -> Strategy:
        """How the trace of a problem is probed."""
        return self.strategy if split == "train" and not self.audits(number) else "all"

    def samples_of(self, split: str) -> int:
        """Probes per boundary of a split's traces."""
        return self.samples if split == "train" else 1

    def audits(self, number: int) -> bool:
        """Whether a train problem is in the audit: a hash of its number, so that no batching plays a part."""
        digest = hashlib.sha256(f"audit {number}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.audit * 2**64


def sample_key(number: int, sample: int) -> int:
    """The noise key of a probe's sample; sample 0 has the problem's own, the noise that a live exit would see.

    Args:
        number: Number of the problem, below 2**40, so that no sample of one problem has the key of another.
        sample: 0-based.
    """
    assert 0 <= number < 1 << _SAMPLE_BITS, f"problem number {number} has no room for samples"
    return number + (sample << _SAMPLE_BITS)


def questions(strategy: Strategy, known: Sequence[bool | None]) -> list[int]:
    """The boundaries of a trace to probe next; none when the strategy has what it wants.

    Args:
        strategy: All unknown ones at once, or one at a time.
        known: Whether each boundary matches; None: not known yet. The natural end matches.
    """
    if strategy == "all":
        return [i for i, match in enumerate(known) if match is None]
    match_at = next((i for i, match in enumerate(known) if match), len(known))
    low = 1 + max((i for i, match in enumerate(known[:match_at]) if match is False), default=-1)
    if low >= match_at:
        return []
    return [(low + match_at) // 2 if strategy == "bisect" else low]


def conclude(strategy: Strategy, known: Sequence[bool | None]) -> list[bool | None]:
    """Labels of all boundaries when there are no more questions; None: the strategy does not say."""
    if strategy != "bisect":
        return list(known)
    match_at = next((i for i, match in enumerate(known) if match), len(known))
    return [i >= match_at if match is None else match for i, match in enumerate(known)]


def rehearse(
    strategy: Strategy, matches: Sequence[bool], *, free: Sequence[bool]
) -> tuple[list[bool], list[bool | None]]:
    """What a strategy would have asked and concluded on a trace that was probed at every boundary.

    Args:
        strategy: The strategy to try.
        matches: What the probes said.
        free: Boundaries that cost nothing, since they are the natural end.

    Returns:
        Which boundaries it asks, and its labels.
    """
    known = [match if cost_free else None for match, cost_free in zip(matches, free, strict=True)]
    asked = [False] * len(matches)
    while wanted := questions(strategy, known):
        for i in wanted:
            known[i], asked[i] = matches[i], True
    return asked, conclude(strategy, known)

"""The signals that exit policies read: four that a head learns, and derived ones, one file each.

A public module of this package defines one derived signal, as its constant `SIGNAL`; it is found by being there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.signals._base import DerivedSignal, ScoreTransform, Signal
from ace_learn.signals._columns import ACCEPTANCE, CANDIDATES, COLUMNS, SCALARS
from ace_learn.signals._registry import LEARNED_SIGNALS, discover

LEARNED = tuple(signal.name for signal in LEARNED_SIGNALS)
"""Column order of head outputs and targets; units: probability, share in [0, 1], tokens, probability."""

DERIVED: tuple[DerivedSignal, ...] = discover(__name__, __path__)
"""The signals computed from running columns, ordered by name."""

SIGNALS = (*LEARNED, *(signal.name for signal in DERIVED))
"""Column order of every tensor behind the head: the learned signals, then the derived ones."""

BY_NAME: Mapping[str, Signal] = {signal.name: signal for signal in (*LEARNED_SIGNALS, *DERIVED)}


def with_derived(
    learned: Float[Tensor, "*rows L"], features: Mapping[str, Float[Tensor, "*rows _"]]
) -> Float[Tensor, "*rows S"]:
    """All signals of rows: replay and live decoding both compute the derived ones here.

    Args:
        learned: What the head says, columns `LEARNED`.
        features: Feature source -> its columns (as in `COLUMNS`), for the sources at hand.

    Returns:
        Columns `SIGNALS`; a derived signal whose sources are not at hand is NaN, on which no predicate holds.
    """
    unknown = torch.full_like(learned[..., 0], torch.nan)
    derived = [signal.values(features) if features.keys() >= set(signal.sources) else unknown for signal in DERIVED]
    return torch.cat((learned, *(values.to(learned)[..., None] for values in derived)), dim=-1)


def sources_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The feature sources that each derived signal among some signals is computed from."""
    wanted = set(names)
    return {signal.name: signal.sources for signal in DERIVED if signal.name in wanted}


def named(values: Sequence[float]) -> dict[str, float]:
    """Signals by name, those left out that were not computed (NaN); `values` in the order of `SIGNALS`."""
    return {name: value for name, value in zip(SIGNALS, values, strict=True) if value == value}


__all__ = [
    "LEARNED",
    "DERIVED",
    "SIGNALS",
    "BY_NAME",
    "SCALARS",
    "CANDIDATES",
    "ACCEPTANCE",
    "COLUMNS",
    "Signal",
    "DerivedSignal",
    "ScoreTransform",
    "with_derived",
    "sources_of",
    "named",
]

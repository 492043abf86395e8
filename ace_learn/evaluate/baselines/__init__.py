"""Baselines, one file each, by the name they have in the result table."""

from ace_learn.evaluate.baselines.base import Baseline, ScoreBaseline, score_quantiles
from ace_learn.evaluate.baselines.budget import Budget
from ace_learn.evaluate.baselines.confidence import Confidence
from ace_learn.evaluate.baselines.full import Full
from ace_learn.evaluate.baselines.no_think import NoThink
from ace_learn.evaluate.baselines.oracle import Oracle

BASELINES: dict[str, type[Baseline]] = {
    "full": Full,
    "no_think": NoThink,
    "budget": Budget,
    "confidence": Confidence,
    "oracle": Oracle,
}
"""Name in the table -> class."""

__all__ = [
    "BASELINES",
    "Baseline",
    "Budget",
    "Confidence",
    "Full",
    "NoThink",
    "Oracle",
    "ScoreBaseline",
    "score_quantiles",
]

"""Baselines, one file each, by the name they have in the result table.

A new baseline is one file and one line here, the import of its class.
"""

from ace_learn.evaluate.baselines.base import Baseline, ScoreBaseline, score_quantiles
from ace_learn.evaluate.baselines.budget import Budget as Budget
from ace_learn.evaluate.baselines.confidence import Confidence as Confidence
from ace_learn.evaluate.baselines.full import Full as Full
from ace_learn.evaluate.baselines.no_think import NoThink as NoThink
from ace_learn.evaluate.baselines.oracle import Oracle as Oracle

_IMPORTED: list[type[Baseline]] = [
    value for value in list(globals().values()) if isinstance(value, type) and hasattr(value, "name")
]

BASELINES: dict[str, type[Baseline]] = {
    baseline.name: baseline for baseline in sorted(_IMPORTED, key=lambda found: (found.tuned, found.name))
}
"""Name in the table -> class, for every class imported above: those without a threshold to tune first, then by name."""

__all__ = ["BASELINES", "Baseline", "ScoreBaseline", "score_quantiles"]

"""The exit rule: per-token state machine, policies, and the tracker that engines call."""

from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.exit.scalars import CANDIDATES, SCALARS
from ace_learn.signals import LEARNED, SIGNALS

__all__ = ["CANDIDATES", "LEARNED", "SCALARS", "SIGNALS", "ExitPolicy", "ScoreModel"]

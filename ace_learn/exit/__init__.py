"""The exit rule: per-token state machine, policies, and the tracker that engines call."""

from ace_learn.exit.policy import SIGNALS, ExitPolicy, ScoreModel
from ace_learn.exit.scalars import SCALARS

__all__ = ["SCALARS", "SIGNALS", "ExitPolicy", "ScoreModel"]

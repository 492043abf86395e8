"""`check_policy` passes for every predicate, and names the law that a broken policy or tracker breaks."""

from dataclasses import dataclass, replace

import pytest
import torch

from ace_learn.exit import ExitPolicy, ScoreModel
from ace_learn.exit.tracker import ExitTracker
from ace_learn.testing import LawError, check_policy

ALL = {"predicate": "all", "thresholds": {"consistency": 0.6, "remaining": 200.0}}
POLICIES = {
    "never": ExitPolicy.never(),
    "specexit": ExitPolicy.specexit(),
    "all": ExitPolicy(**ALL, ewma=0.5, patience=2),
    "any": ExitPolicy(predicate="any", thresholds={"remaining": 50.0, "confidence": 0.9}, min_thinking_tokens=3_000),
    "score": ExitPolicy(
        predicate="score",
        score=ScoreModel(signals=("consistency", "remaining"), weights=(2.0, -1.0), bias=1.0, threshold=0.5),
    ),
}


@dataclass(frozen=True, kw_only=True)
class LooksAround(ExitPolicy):
    def holds(self, smoothed):
        return super().holds(smoothed) & (smoothed[..., 3].mean() > 0.8 if len(smoothed) > 1 else torch.tensor(True))


@dataclass(frozen=True, kw_only=True)
class FiresOnNan(ExitPolicy):
    def holds(self, smoothed):
        return super().holds(smoothed.nan_to_num(nan=1.0))


@dataclass(frozen=True, kw_only=True)
class WrongWay(ExitPolicy):
    def holds(self, smoothed):
        return smoothed[..., 2] > self.thresholds["remaining"]


@dataclass(frozen=True, kw_only=True)
class ForgetsPatience(ExitPolicy):
    def to_json(self):
        return replace(self, patience=1).to_json() if self.patience > 1 else super().to_json()


@dataclass(frozen=True, kw_only=True)
class Unsealed(ExitPolicy):
    @classmethod
    def from_json(cls, data):
        fields = {name: value for name, value in data.items() if name != "sha256"}
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Impatient(ExitPolicy):
    def __post_init__(self):
        object.__setattr__(self, "patience", 1)


@dataclass(frozen=True, kw_only=True)
class NoMinimum(ExitPolicy):
    def __post_init__(self):
        object.__setattr__(self, "min_thinking_tokens", 0)


@dataclass(frozen=True, kw_only=True)
class TakesTurns(ExitPolicy):
    def holds(self, smoothed):
        replayed = smoothed.ndim == 2 and len(smoothed) not in (1, 6)  # neither one request nor the suite's six
        return super().holds(smoothed) & torch.tensor(not replayed)


class CountsSteps(ExitTracker):
    """Lets the first row of a step decide for all of it."""

    def observe(self, slots, rows):
        verdict = super().observe(slots, rows)
        return verdict._replace(forced=verdict.forced[:, :1].expand_as(verdict.forced))


class AnyBlock(ExitTracker):
    """Forces at every boundary that thinks, in whichever block."""

    def observe(self, slots, rows):
        verdict = super().observe(slots, rows)
        eager = verdict.in_think & verdict.closed & (verdict.smoothed[..., 3] > 0.6) & (verdict.smoothed[..., 2] < 200)
        return verdict._replace(forced=torch.where(eager, self.end[0], verdict.forced))


BROKEN = [
    ("the rule does not depend on the other requests", LooksAround(**ALL), ExitTracker),
    ("the rule does not depend on how many tokens", ExitPolicy(**ALL), CountsSteps),
    ("replay decides as the tracker does", TakesTurns(**ALL), ExitTracker),
    ("NaN never fires", FiresOnNan(predicate="all", thresholds={"consistency": 0.6}), ExitTracker),
    ("a stricter policy never exits earlier", WrongWay(predicate="all", thresholds={"remaining": 380.0}), ExitTracker),
    ("JSON brings the policy back", ForgetsPatience(**ALL, patience=2), ExitTracker),
    ("a certified policy that was changed is refused", Unsealed(**ALL), ExitTracker),
    ("the patience is kept", Impatient(**ALL), ExitTracker),
    ("the minimum is kept", NoMinimum(**ALL), ExitTracker),
    ("only the first think block is exited", ExitPolicy(**ALL), AnyBlock),
]


@pytest.mark.parametrize("name", POLICIES)
def test_every_predicate_passes(name):
    check_policy(POLICIES[name], seed=2)


@pytest.mark.parametrize(("law", "policy", "tracker"), BROKEN, ids=[law for law, *_ in BROKEN])
def test_a_broken_one_fails_by_the_name_of_its_law(law, policy, tracker):
    with pytest.raises(LawError, match=f"^{law}.*: given .*: expected .*, got "):
        check_policy(policy, tracker=tracker)


def test_a_policy_that_cannot_be_run_is_a_broken_law():
    @dataclass(frozen=True, kw_only=True)
    class Raises(ExitPolicy):
        def holds(self, smoothed):
            if smoothed.isfinite().all():
                raise KeyError("calibration")
            return super().holds(smoothed)

    with pytest.raises(LawError, match=r"the rule runs on any stream.*KeyError"):
        check_policy(Raises(**ALL))

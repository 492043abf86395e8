from dataclasses import replace

import pytest
import torch

from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.exit.rule import PolicyRows, limits_of
from ace_learn.signals import SIGNALS

ALL = ExitPolicy(predicate="all", thresholds={"confidence": 0.5, "remaining": 20.0}, patience=2)
SCORE = ExitPolicy(
    predicate="score", score=ScoreModel(signals=("progress",), weights=(3.0,), bias=-1.0, threshold=0.5), ewma=0.3
)


def test_limits_are_in_the_familys_order():
    turned = ExitPolicy(predicate="all", thresholds={"remaining": 5.0, "confidence": 0.9}, min_thinking_tokens=7)
    assert limits_of(turned, ALL) == (0.9, 5.0, 1, 7)
    assert limits_of(SCORE, SCORE) == (0.5, 1, 0)


@pytest.mark.parametrize(
    "other",
    [
        replace(ALL, ewma=0.5),
        replace(ALL, predicate="any"),
        replace(ALL, smooth_over="tokens"),
        replace(ALL, thresholds={"confidence": 0.5}),
        ExitPolicy.never(),
        SCORE,
    ],
)
def test_another_family_is_refused(other):
    with pytest.raises(ValueError, match="bounds, patience and minimum"):
        limits_of(other, ALL)


def test_a_certificate_makes_no_family():
    assert limits_of(ALL.with_certificate({"alpha": 0.02}), ALL) == limits_of(ALL, ALL)


@pytest.mark.parametrize(
    "policies",
    [
        [ALL, replace(ALL, thresholds={"confidence": 0.2, "remaining": 90.0}, patience=3)],
        [SCORE, replace(SCORE, score=replace(SCORE.score, threshold=0.8), min_thinking_tokens=9)],
    ],
)
def test_each_request_is_judged_by_its_own_policy(policies):
    smoothed = torch.rand(2, 40, len(SIGNALS), generator=torch.Generator().manual_seed(0))
    smoothed[..., SIGNALS.index("remaining")] *= 100
    family = policies[0]
    rows = PolicyRows.unpack(family, torch.tensor([limits_of(policy, family) for policy in policies]))
    held = rows.holds(smoothed)
    for row, policy in enumerate(policies):
        assert torch.equal(held[row], policy.holds(smoothed[row]))
    assert held.any()
    assert not torch.equal(held[0], policies[0].holds(smoothed[1]))
    assert rows.patience.flatten().tolist() == [policy.patience for policy in policies]
    assert rows.min_thinking_tokens.flatten().tolist() == [policy.min_thinking_tokens for policy in policies]
    assert (rows.ewma, rows.smooth_over) == (family.ewma, family.smooth_over)

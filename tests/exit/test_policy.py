"""Exit policies: predicates, smoothing, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.exit.policy import ExitPolicy, ScoreModel, smooth


def signals(confidence=0.0, progress=0.0, remaining=0.0, consistency=0.0):
    return torch.tensor([confidence, progress, remaining, consistency])


def test_specexit_constants():
    policy = ExitPolicy.specexit()
    assert policy.holds(signals(0.81, 0.31, 199.0))
    assert not policy.holds(signals(0.8, 0.31, 199.0))  # the bounds are strict
    assert not policy.holds(signals(0.81, 0.31, 200.0))
    assert policy.ewma == 0.1
    assert policy.smooth_over == "tokens"


def test_any_and_never():
    policy = ExitPolicy(predicate="any", thresholds={"confidence": 0.9, "remaining": 10.0})
    assert policy.holds(signals(remaining=5.0))
    assert not policy.holds(signals(0.5, remaining=50.0))
    assert not ExitPolicy.never().holds(signals(1.0, 1.0, 0.0, 1.0))


def test_score_by_hand():
    score = ScoreModel(signals=("consistency", "remaining"), weights=(2.0, -1.0), bias=0.5, threshold=0.5)
    model = ExitPolicy(predicate="score", score=score)
    # 0.5 + 2*0.25 - log(1 + e - 1) = 0: exactly the threshold, which does not fire
    assert score.probability(signals(consistency=0.25, remaining=0.0)) == pytest.approx(0.7310586)
    assert model.holds(signals(consistency=0.25, remaining=1.0))
    assert not model.holds(signals(consistency=0.25, remaining=10.0))


def test_nan_never_fires():
    nan = signals(confidence=torch.nan)
    assert not ExitPolicy(predicate="all", thresholds={"confidence": 0.0}).holds(nan)
    score = ScoreModel(signals=("confidence",), weights=(1.0,), bias=9.0, threshold=0.5)
    assert not ExitPolicy(predicate="score", score=score).holds(nan)


def test_ewma_by_hand():
    series = torch.tensor([[1.0], [0.0], [1.0]]).repeat(1, 4)
    assert smooth(series, 0.5)[:, 0].tolist() == [1.0, 0.5, 0.75]  # the first value initialises
    assert smooth(series, 1.0) is series


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_threshold_never_fires_more(low, high, value):
    low, high = sorted((low, high))
    fires = [
        bool(ExitPolicy(predicate="all", thresholds={"progress": t}).holds(signals(progress=value)))
        for t in (low, high)
    ]
    assert fires[0] >= fires[1]


def test_json_round_trip_and_refusals():
    score = ScoreModel(signals=("progress",), weights=(1.5,), bias=-1.0, threshold=0.7)
    policy = ExitPolicy(predicate="score", score=score, patience=2, certificate={"alpha": 0.02})
    assert ExitPolicy.from_json(policy.to_json()) == policy
    with pytest.raises(ValueError, match="keys"):
        ExitPolicy.from_json({**policy.to_json(), "extra": 1})
    with pytest.raises(ValueError, match="not an exit policy"):
        ExitPolicy.from_json({**policy.to_json(), "patience": "two"})
    for wrong, message in (
        ({"predicate": "all"}, "at least one threshold"),
        ({"predicate": "all", "thresholds": {"mood": 1.0}}, "unknown signals"),
        ({"predicate": "all", "thresholds": {"progress": torch.nan}}, "finite"),
        ({"predicate": "never", "ewma": 0.0}, "ewma"),
        ({"predicate": "never", "patience": 0}, "patience"),
        ({"predicate": "score"}, "score model"),
    ):
        with pytest.raises(ValueError, match=message):
            ExitPolicy(**wrong)


def test_a_certified_policy_that_was_edited_is_refused():
    policy = ExitPolicy(predicate="all", thresholds={"progress": 0.9}, certificate={"alpha": 0.02})
    assert ExitPolicy.from_json(policy.to_json()) == policy
    with pytest.raises(ValueError, match="changed after it was certified"):
        ExitPolicy.from_json({**policy.to_json(), "thresholds": {"progress": 0.1}})
    free = ExitPolicy(predicate="all", thresholds={"progress": 0.9})
    assert ExitPolicy.from_json({**free.to_json(), "thresholds": {"progress": 0.1}}).thresholds == {"progress": 0.1}


def test_score_models_that_cannot_work_are_refused():
    for signals, weights in ((("progress", "progress"), (1.0, 1.0)), (("progress",), (torch.nan,))):
        with pytest.raises(ValueError, match=r"once|finite"):
            ScoreModel(signals=signals, weights=weights, bias=0.0, threshold=0.5)

from dataclasses import replace

import numpy as np
import pytest
import torch

from ace_learn.evaluate.calibration import Certificate
from ace_learn.evaluate.compare import certified_policies
from ace_learn.evaluate.learned import (
    PolicyFamily,
    Risk,
    Scope,
    at_point,
    build_candidates,
    calibrate_policy,
    fit_score_model,
    frontier,
    policy_exits,
    threshold_point,
)
from ace_learn.evaluate.metrics import savings_of
from ace_learn.evaluate.replay import replay
from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.signals import LEARNED, SIGNALS
from ace_learn.speculation.drafters import DraftStates
from tests.evaluate.synthetic import World, make_signals, make_traces

SCOPE = Scope(data_sha256="d" * 64, head_sha256="a" * 64, model_fingerprint="f" * 64, sampling={"temperature": 1.0})
WORLD = World(noise=0.5)


def split(n, seed, world=WORLD):
    traces = make_traces(n, seed=seed, world=world)
    return traces, make_signals(traces, seed=seed, world=world)


def slow_exits(policy, signals, traces):
    """The state machine of the exit rule, boundary by boundary, on smoothed signals."""
    exits = []
    for i in range(traces.num_problems):
        holding, exit_index = 0, int(traces.num_boundaries[i])
        for b in range(traces.num_boundaries[i]):
            holds = bool(policy.holds(torch.from_numpy(signals[i, b])))
            holding = holding + 1 if holds else 0
            if holding >= policy.patience and traces.boundary[i, b] + 1 >= policy.min_thinking_tokens:
                exit_index = b
                break
        exits.append(exit_index)
    return exits


SCORE = ScoreModel(signals=("remaining", "consistency"), weights=(-0.5, 3.0), bias=0.1, threshold=0.7)


@pytest.mark.parametrize(
    "policy",
    [
        ExitPolicy(
            predicate="all", thresholds={"progress": 0.6, "remaining": 20.0}, patience=2, min_thinking_tokens=30
        ),
        ExitPolicy(predicate="any", thresholds={"progress": 0.95, "consistency": 0.97}),
        ExitPolicy(predicate="score", score=SCORE, patience=2),
        ExitPolicy.never(),
    ],
)
def test_exits_equal_the_slow_rule(policy):
    traces, signals = split(80, 3)
    exits = policy_exits([policy], signals, traces)
    assert exits.shape == (1, 80)
    assert exits[0].tolist() == slow_exits(policy, signals, traces)


@pytest.mark.parametrize("predicate", ["score", "all", "any"])
@pytest.mark.parametrize("signals", [LEARNED, ("consistency",), ("progress", "remaining")])
def test_candidates_are_ordered_by_validation_savings(predicate, signals):
    traces, smoothed = split(200, 1)
    family = PolicyFamily(predicate=predicate, signals=signals, grid_size=25, patience=1)
    candidates = build_candidates(family, smoothed, traces, Risk())
    assert 5 <= len(candidates.policies) <= 25
    savings = savings_of(replay(traces, policy_exits(candidates.policies, smoothed, traces)), traces)
    assert (savings > 0).all()
    assert (np.diff(savings) >= 0).all()
    assert all(policy.predicate == predicate for policy in candidates.policies)


def test_score_grid_covers_all_savings_and_is_finest_near_the_risk_level():
    traces, smoothed = split(1000, 1, World(noise=1.0))
    risk = Risk(alpha=0.02)
    candidates = build_candidates(PolicyFamily(grid_size=40), smoothed, traces, risk)
    replayed = replay(traces, policy_exits(candidates.policies, smoothed, traces))
    savings, rate = savings_of(replayed, traces), replayed.lost_correct.mean(axis=1)
    assert np.diff(savings).max() < 4 * savings[-1] / 40
    near = (rate > 0) & (rate < 3 * risk.alpha)
    assert near.sum() >= 12
    assert np.diff(rate[near]).max() <= 0.01
    thresholds = [threshold_point(policy)["score"] for policy in candidates.policies]
    assert (np.diff(thresholds) < 0).all()


def test_score_model_equals_a_scikit_learn_pipeline():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    traces, smoothed = split(300, 2, World(noise=1.5))
    family = PolicyFamily(signals=("remaining", "consistency"))
    model = fit_score_model(family, smoothed, traces)
    real = traces.is_boundary
    features = np.stack([np.log1p(smoothed[real][:, 2]), smoothed[real][:, 3]], axis=1).astype(np.float64)
    reference = make_pipeline(StandardScaler(), LogisticRegression()).fit(features, traces.matches_at[:, :-1][real])
    probability = model.probability(torch.from_numpy(smoothed[real])).numpy()
    np.testing.assert_allclose(probability, reference.predict_proba(features)[:, 1], atol=1e-4)
    assert model.weights[0] < 0 < model.weights[1]


def test_safe_label_counts_what_was_wrong_anyway():
    traces, smoothed = split(300, 2, World(full_accuracy=0.5))
    matches = fit_score_model(PolicyFamily(), smoothed, traces)
    safe = fit_score_model(PolicyFamily(label="safe"), smoothed, traces)
    at_start = torch.from_numpy(smoothed[:, 0])
    assert safe.probability(at_start).mean() > matches.probability(at_start).mean() + 0.2


def test_where_all_labels_agree_there_is_nothing_to_learn():
    traces, smoothed = split(20, 1, World(early_guess=0.0, late_slip=1.0))  # no early answer ever matches
    candidates = build_candidates(PolicyFamily(), smoothed, traces, Risk())
    assert candidates.policies == ()
    calibrated = calibrate_policy(candidates, smoothed, traces, risk=Risk(), scope=SCOPE)
    assert calibrated.policy == ExitPolicy.never()


def test_frontier_by_hand():
    savings = np.array([0.5, 0.3, 0.3, 0.9, 0.0, 0.4, 0.5, 0.6])
    losses = np.array([3, 1, 2, 8, 0, 3, 3, 9])
    # (0.3, 2) and (0.6, 9) lose more than a point that saves as much; (0.5, 3) comes once; 0.0 saves nothing
    assert [(savings[i], losses[i]) for i in frontier(savings, losses)] == [(0.3, 1), (0.4, 3), (0.5, 3), (0.9, 8)]


@pytest.mark.parametrize("predicate", ["score", "all"])
def test_calibrated_policy_saves_and_carries_its_certificate(predicate):
    validation, on_validation = split(400, 1)
    calibration, on_calibration = split(1000, 2)
    family = PolicyFamily(predicate=predicate)
    candidates = build_candidates(family, on_validation, validation, Risk())
    calibrated = calibrate_policy(candidates, on_calibration, calibration, risk=Risk(), scope=SCOPE)
    policy = calibrated.policy
    certificate = Certificate.from_json(policy.certificate)
    assert certificate.n == 1000
    assert certificate.losses <= 12
    assert certificate.p_value <= 0.05
    assert certificate.data_sha256 == SCOPE.data_sha256
    assert certificate.grid[certificate.chosen] == threshold_point(policy)
    assert calibrated.savings[certificate.chosen] == max(calibrated.savings[list(certificate.certified)])
    exits = policy_exits([policy], on_calibration, calibration)[0]
    assert replay(calibration, exits).lost_correct.sum() == certificate.losses
    assert calibrated.savings[certificate.chosen] > 0.3
    assert ExitPolicy.from_json(policy.to_json()) == policy


def test_a_certificate_names_the_drafter_where_acceptance_is_read():
    validation, on_validation = split(400, 1)
    calibration, on_calibration = split(1000, 2)
    derived = ((0, 0), (0, 0), (0, len(SIGNALS) - len(LEARNED)))
    on_validation, on_calibration = (np.pad(s, derived, constant_values=0.5) for s in (on_validation, on_calibration))
    states = DraftStates(size=8, delay=5, drafter="abc")
    for names, expected in [(("consistency", "acceptance"), states.to_json()), (("consistency",), None)]:
        candidates = build_candidates(PolicyFamily(signals=names), on_validation, validation, Risk())
        scope = replace(SCOPE, draft=states)
        policy = calibrate_policy(candidates, on_calibration, calibration, risk=Risk(), scope=scope).policy
        assert policy.certificate.get("draft") == expected
        assert Certificate.from_json(policy.certificate).draft == expected


def test_the_whole_grid_comes_back_from_the_certificate():
    validation, on_validation = split(300, 1)
    calibration, on_calibration = split(800, 2)
    candidates = build_candidates(PolicyFamily(), on_validation, validation, Risk())
    policy = calibrate_policy(candidates, on_calibration, calibration, risk=Risk(), scope=SCOPE).policy
    assert certified_policies(policy) == candidates.policies
    assert certified_policies(ExitPolicy.never()) == ()
    both = ExitPolicy(predicate="any", thresholds={"progress": 0.5})
    assert at_point(both, {"progress": 0.25}).thresholds == {"progress": 0.25}


def test_too_few_problems_give_never_and_say_how_many():
    validation, on_validation = split(300, 1)
    calibration, on_calibration = split(100, 2)
    candidates = build_candidates(PolicyFamily(), on_validation, validation, Risk())
    calibrated = calibrate_policy(candidates, on_calibration, calibration, risk=Risk(), scope=SCOPE)
    assert calibrated.policy == ExitPolicy.never()
    assert "calibration problems" in calibrated.result.message


def test_mismatch_needs_no_gold_but_lost_correct_does():
    calibration, smoothed = split(400, 2)
    blind = type(calibration)(
        **{name: getattr(calibration, name) for name in calibration.__dataclass_fields__}
        | {"has_gold": np.zeros(400, dtype=bool), "correct_at": np.zeros_like(calibration.correct_at)}
    )
    candidates = build_candidates(PolicyFamily(), smoothed, calibration, Risk())
    with pytest.raises(ValueError, match="'mismatch' instead"):
        calibrate_policy(candidates, smoothed, blind, risk=Risk(), scope=SCOPE)
    risk = Risk(loss="mismatch", alpha=0.1)
    calibrated = calibrate_policy(candidates, smoothed, blind, risk=risk, scope=SCOPE)
    exits = policy_exits(candidates.policies, smoothed, blind)
    np.testing.assert_array_equal(calibrated.result.losses, replay(blind, exits).mismatch.sum(axis=1))
    assert calibrated.result.chosen is not None


@pytest.mark.parametrize(
    "options",
    [{"signals": ()}, {"signals": ("progress", "progress")}, {"signals": ("hope",)}, {"grid_size": 1}, {"ewma": 0.0}],
)
def test_impossible_families_are_refused(options):
    with pytest.raises(ValueError, match=r"signals|grid_size|ewma"):
        PolicyFamily(**options)


def test_impossible_levels_are_refused():
    with pytest.raises(ValueError, match="alpha=2"):
        Risk(alpha=2.0)


@pytest.mark.parametrize("predicate", ["all", "any"])
def test_a_label_that_nothing_would_read_is_refused(predicate):
    with pytest.raises(ValueError, match="read by the predicate 'score' alone"):
        PolicyFamily(predicate=predicate, label="safe")

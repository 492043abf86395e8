"""Studies of speculation, small: events against the engine's own counts, predictors against known laws, and reports."""

import json

import numpy as np
import pytest
import torch

from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.speculation.estimator import EstimatorBenchmark, benchmark_estimator
from ace_learn.evaluate.speculation.events import FEATURES, Steps, collect, hidden_states
from ace_learn.evaluate.speculation.features import FeatureStudy, compare_features, run_stream, study_features
from ace_learn.evaluate.speculation.predictors import Events, ece, fit, quality
from ace_learn.evaluate.speculation.rules import RuleStudy, study_rules
from ace_learn.evaluate.speculation.setting import NoisedDraft, Pair, SpeculationSetting
from ace_learn.evaluate.speculation.verification import VerificationSweep, sweep_verification
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator

SETTING = SpeculationSetting(noised=NoisedDraft(noise=0.3, draft_tokens=3), max_new_tokens=60)
EAGLE = SpeculationSetting(
    drafter=DrafterConfig(kind="eagle3", model="ace_learn/reasoner-eagle3", draft_tokens=3), max_new_tokens=60
)


@pytest.fixture(scope="module", params=[SETTING, EAGLE], ids=["draft model", "eagle3"])
def pair(request):
    return Pair(request.param)


def test_events_are_what_the_engine_counted(pair):
    _, requests = pair.problems(6)
    steps, outputs = collect(pair, requests, temperature=1.0, batch_size=4)
    for request, output in zip(requests, outputs, strict=True):
        mine = steps.request == request.key
        assert int(steps.accepted[mine].sum()) == output.stats.accepted
        assert 0 < int(mine.sum()) < output.stats.verify_steps  # the prefill drafts nothing, nor does a last step
    assert steps.judged()[steps.accepted < steps.drafted].sum() > 0
    assert bool((steps.labels() <= steps.judged()).all())


def test_each_judged_draft_has_the_state_that_it_was_drawn_from(pair):
    _, requests = pair.problems(3)
    steps, outputs = collect(pair, requests, temperature=1.0, batch_size=3)
    drafter = pair.drafter(Sampling())
    states = torch.from_numpy(hidden_states(drafter, pair.target, requests, outputs, steps)).float()
    project = pair.noised.model.lm_head if pair.noised is not None else drafter.module.full_logits
    with torch.inference_mode():  # gives the very law that the recorder saw while decoding
        found = project(states).softmax(-1).amax(-1).numpy()
    judged = steps.judged() == 1
    assert 20 < judged.sum() < judged.size
    assert len({int(n) for n in steps.length}) > 10
    recorded = steps.features[..., FEATURES.index("max")]
    assert found[judged] == pytest.approx(recorded[judged], abs=5e-3)  # the states are in half precision
    assert recorded[judged].std() > 0.05
    behind = steps._replace(length=steps.length + 1000, drafted=np.zeros_like(steps.drafted))
    assert np.isfinite(hidden_states(drafter, pair.target, requests, outputs, behind)).all()


def synthetic(count=4000, width=3, slope=0.7, seed=0):
    """Steps whose acceptance follows a known law of the first feature."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(count, width, 6)) * 2
    accepts = draw.random((count, width)) < 1 / (1 + np.exp(-(slope * features[..., 0] + 0.5)))
    accepted = accepts.cumprod(axis=1).sum(axis=1)
    features[..., 1] = 1 / (1 + np.exp(-features[..., 0]))
    return Steps(
        np.arange(count) % 100, np.full(count, 9), np.ones(count, int), features, accepted, np.full(count, width)
    )


def test_predictors_find_a_known_law():
    steps = synthetic()
    row, position = np.nonzero(steps.judged())
    model = fit(steps.features[row, position, 0], Events(position, steps.labels()[row, position]), 3)
    assert model.slope == pytest.approx(0.7, abs=0.06)
    assert model.intercepts == pytest.approx([0.5] * 3, abs=0.2)
    found = compare_features(steps, None)
    assert found["logit_max, fitted"]["log_loss"] < found["max, unfitted"]["log_loss"]
    assert found["logit_max, fitted"]["auc"] > found["margin, fitted"]["auc"] + 0.1
    assert not found["logit_sampled, fitted"]["lossless"]


def test_quality_by_hand():
    events = Events(np.zeros(4, int), np.array([1, 0, 1, 1]))
    predicted = np.array([0.95, 0.95, 0.35, 0.35])
    assert ece(events.label, predicted) == pytest.approx((0.9 + 1.3) / 4)
    assert quality(events, predicted)["auc"] == pytest.approx(0.5 / 3)  # three pairs: a tie, and two that are wrong
    assert quality(Events(np.zeros(1, int), np.array([1])), np.array([0.5]))["auc"] is None


def test_a_stream_is_predicted_before_it_is_seen():
    steps = synthetic(64)
    first = run_stream(steps, OnlineAcceptanceEstimator(3, refit_interval=1), 32).predicted[:32]
    at_start = 1 / (1 + np.exp(-(0.5 * steps.features[:32, :, 0] - 0.2)))
    assert first == pytest.approx(at_start, abs=1e-5)


def test_the_study_of_rules_is_written(tmp_path):
    config = RuleStudy(
        setting=SETTING, deltas=[0.5], epsilons=[0.09], problems=4, enumerated_rows=10, output=tmp_path / "rules"
    )
    rows = study_rules(config)
    assert list(rows) == ["standard", "typical 0.09", "cactus 0.5", "cactus_exact 0.5"]
    assert rows["standard"]["kl_per_token"]["value"] == 0
    assert rows["standard"]["output_kl_max"] == pytest.approx(0, abs=1e-9)
    assert rows["cactus_exact 0.5"]["kl_per_token"]["value"] > 0
    assert json.loads((tmp_path / "rules" / "results.json").read_text()) == rows
    assert (tmp_path / "rules" / "provenance.json").exists()


@pytest.mark.slow
def test_the_study_of_features_is_written(tmp_path):
    config = FeatureStudy(
        setting=EAGLE, problems=8, workload_problems=4, workload_temperatures=[0.7], output=tmp_path / "features"
    )
    results = study_features(config)
    assert set(results["streams"]) == {"as drafted", "distorted", "switch", "poisoned"}
    assert "confidence head" in results["features"]
    assert "| logit_max, fitted | yes |" in (tmp_path / "features" / "table.md").read_text()


@pytest.mark.slow
def test_the_sweep_of_verification_is_written(tmp_path):
    config = VerificationSweep(
        setting=SETTING, fixed=[0, 1], concurrency=[2], problems=4, simulated=[2], simulated_steps=20,
        output=tmp_path / "sweep",
    )  # fmt: skip
    results = sweep_verification(config)
    assert set(results["decoded"]["2"]) == {"K = 0", "K = 1", "K = 3", "adaptive, K = 3"}
    assert (tmp_path / "sweep" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_costs_of_the_estimator(capsys):
    figures = benchmark_estimator(EstimatorBenchmark(requests=4, draft_tokens=2, vocabulary=50, steps=10))
    assert all(value > 0 for value in figures.values())
    assert "B = 4, K = 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SpeculationSetting(drafter=DrafterConfig(kind="ngram")), "draft probabilities"),
        (lambda: NoisedDraft(noise=-1.0), "noise >= 0"),
        (lambda: RuleStudy(problems=1), "problems >= 2"),
        (lambda: RuleStudy(deltas=[-1.0]), "needs a delta"),
        (lambda: FeatureStudy(distorted=0.0), "temperatures > 0"),
        (lambda: VerificationSweep(fixed=[9]), "between 0 and 4"),
        (lambda: EstimatorBenchmark(steps=0), "must be >= 1"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()

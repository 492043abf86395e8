"""The online acceptance estimator: a hand-worked refit, scikit-learn at convergence, and what it adds to vLLM's own."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from ace_learn.speculation.estimator import OnlineAcceptanceEstimator, log_odds

K = 4


def traffic(steps, *, batch=32, slope=0.8, intercepts=(0.5, 0.2, -0.1, -0.4), seed=0):
    """Features, accepted and drafted counts of verify steps whose acceptance follows a known law."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        features = torch.randn(batch, K, generator=draw) * 2 + 0.5
        accepts = torch.rand(batch, K, generator=draw) < torch.sigmoid(slope * features + torch.tensor(intercepts))
        drafted = torch.randint(1, K + 1, (batch,), generator=draw)
        leading = accepts.long().cumprod(1).sum(1)
        yield features, torch.minimum(leading, drafted), drafted


def labels_of(features, accepted, drafted, mask=None):
    """(feature, position, label) of every draft that the target judged, one by one."""
    for row in range(len(features)):
        for k in range(int(drafted[row])):
            if k > int(accepted[row]):
                break
            if mask is None or bool(mask[row, k]):
                yield float(features[row, k]), k, int(k < int(accepted[row]))


def test_log_odds_by_hand():
    logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
    assert log_odds(logits).item() == pytest.approx(np.log(0.7 / 0.3), rel=1e-5)
    assert log_odds(logits, 0.5).item() == pytest.approx(np.log(0.49 / 0.05), rel=1e-5)
    assert log_odds(logits, 0.0).item() == log_odds(logits).item()  # a greedy drafter's law is that of its logits
    assert log_odds(torch.tensor([[0.0, -200.0], [3.0, 3.0]])).tolist() == pytest.approx([40.0, 0.0], abs=1e-5)


def test_one_refit_by_hand():
    estimator = OnlineAcceptanceEstimator(num_positions=2, refit_interval=1)
    estimator.observe(torch.tensor([[1.0, -1.0], [2.0, 9.0]]), torch.tensor([1, 0]), torch.tensor([2, 2]))
    f, k, y = np.array([1.0, -1.0, 2.0]), np.array([0, 1, 0]), np.array([1, 0, 0])  # the last draft was never judged
    p = 1 / (1 + np.exp(-(0.5 * f - 0.2)))
    design = np.stack([f, k == 0, k == 1], axis=1)
    hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-3 * np.eye(3)
    slope, *_ = np.linalg.solve(hessian, design.T @ (y - p))
    slope = max(slope * 3 / 53, -0.5) if 0.5 + slope * 3 / 53 >= 0 else 0.0
    rest = design[:, 1:].T @ (y - p) - hessian[1:, 0] * slope
    moves = rest / np.diag(hessian)[1:] * np.array([2 / 52, 1 / 51])
    assert float(estimator.slope) == pytest.approx(0.5 + slope, rel=1e-5)
    assert estimator.intercepts.tolist() == pytest.approx((-0.2 + moves).tolist(), rel=1e-5)


def test_a_slope_that_would_turn_negative_stays_and_intercepts_still_move():
    estimator = OnlineAcceptanceEstimator(num_positions=1, refit_interval=1)
    features = torch.tensor([[4.0]] * 300 + [[-4.0]] * 300)
    accepted = torch.tensor([0] * 300 + [1] * 200 + [0] * 100)
    estimator.observe(features, accepted, torch.ones(600, dtype=torch.long))
    assert float(estimator.slope) == 0.5
    assert float(estimator.intercepts[0]) != pytest.approx(-0.2)


def test_a_slope_that_is_far_too_high_comes_down_only_if_it_is_halved():
    """A wide feature with a weak slope, as from a drafter at a low temperature: every Newton step overshoots zero."""
    slopes = {}
    for halve in (False, True):
        draw = torch.Generator().manual_seed(0)
        estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=10, halve_slope=halve)
        for _ in range(200):
            features = (torch.randn(32, K, generator=draw) * 10 + 8).clamp(-40, 40)
            accepts = torch.rand(32, K, generator=draw) < torch.sigmoid(0.15 * features + 0.3)
            estimator.observe(features, accepts.long().cumprod(1).sum(1), torch.full((32,), K))
        slopes[halve] = float(estimator.slope)
    assert slopes[False] == 0.5
    assert slopes[True] == pytest.approx(0.15, abs=0.04)


def test_nothing_observed_changes_nothing():
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=1)
    estimator.observe(torch.full((3, K), torch.nan), torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    assert float(estimator.slope) == 0.5
    assert estimator.intercepts.tolist() == pytest.approx([-0.2] * K)


def test_at_convergence_it_is_an_unpenalised_logistic_regression():
    batches = list(traffic(400, batch=16))
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=len(batches))
    for _ in range(12):
        for batch in batches:
            estimator.observe(*batch)
    rows = [row for batch in batches for row in labels_of(*batch)]
    f, k, y = (np.array(column) for column in zip(*rows, strict=True))
    design = np.concatenate((f[:, None], np.eye(K)[k]), axis=1)
    reference = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000).fit(design, y)
    ours = [float(estimator.slope), *estimator.intercepts.tolist()]
    assert ours == pytest.approx(reference.coef_[0].tolist(), abs=2e-3)


def test_separate_intercepts_for_answer_text():
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=50, separate_answer=True)
    thought = traffic(1500, intercepts=(0.5,) * K, seed=1)
    answered = traffic(1500, intercepts=(2.0,) * K, seed=2)
    for a, b in zip(thought, answered, strict=True):
        both = [torch.cat(pair) for pair in zip(a, b, strict=True)]
        estimator.observe(*both, thinking=torch.arange(64) < 32)
    assert float(estimator.slope) == pytest.approx(0.8, abs=0.05)
    assert estimator.intercepts[0].tolist() == pytest.approx([0.5] * K, abs=0.25)
    assert estimator.intercepts[1].tolist() == pytest.approx([2.0] * K, abs=0.3)
    at_zero = estimator.predict(torch.zeros(2, K), torch.tensor([True, False]))
    assert torch.allclose(at_zero, torch.sigmoid(estimator.intercepts))
    with pytest.raises(ValueError, match="which requests are thinking"):
        estimator.predict(torch.zeros(2, K))


def test_masked_rows_leave_no_trace():
    """A forced row rejects whatever was drafted; with the mask the stream is as if it had not been judged there."""
    clean, masked, poisoned = (OnlineAcceptanceEstimator(num_positions=K, refit_interval=20) for _ in range(3))
    draw = torch.Generator().manual_seed(5)
    for features, accepted, drafted in traffic(600):
        forced = torch.rand(len(drafted), generator=draw) < 0.3
        cut = torch.where(forced, 0, accepted)
        mask = (~forced)[:, None].expand(-1, K)
        masked.observe(features, cut, drafted, mask=mask)
        poisoned.observe(features, cut, drafted)
        clean.observe(features[~forced], accepted[~forced], drafted[~forced])
    assert float(masked.slope) == pytest.approx(float(clean.slope), abs=1e-4)
    assert masked.intercepts.tolist() == pytest.approx(clean.intercepts.tolist(), abs=1e-4)
    assert float(poisoned.intercepts[0]) < float(clean.intercepts[0]) - 0.4


@pytest.mark.parametrize("forgetting", [0.0, 0.7, 1.0])
def test_every_memory_finds_the_law_of_steady_traffic(forgetting):
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=25, forgetting=forgetting)
    for batch in traffic(2000):
        estimator.observe(*batch)
    assert float(estimator.slope) == pytest.approx(0.8, abs=0.1)
    assert estimator.intercepts.tolist() == pytest.approx([0.5, 0.2, -0.1, -0.4], abs=0.25)


def test_kept_sums_are_steadier_and_forgotten_ones_follow_a_switch():
    def spread(forgetting, first, then):
        estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=10, forgetting=forgetting)
        for batch in first:
            estimator.observe(*batch)
        seen = []
        for batch in then:
            estimator.observe(*batch)
            seen.append(float(estimator.intercepts[0]))
        return np.array(seen)

    steady = [spread(g, traffic(400, seed=1), traffic(400, seed=2)).std() for g in (0.0, 0.9)]
    assert steady[1] < steady[0]
    switched = [
        spread(g, traffic(800, seed=1), traffic(160, seed=2, intercepts=(-1.5,) * K))[-1] for g in (0.0, 0.8, 1.0)
    ]
    assert switched[0] < -1.2
    assert switched[1] < -1.2
    assert switched[2] > -0.6  # it still believes in what has passed


def test_save_and_restore_mid_round(tmp_path):
    path = tmp_path / "estimator.safetensors"
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=30, forgetting=0.5)
    batches = list(traffic(140))
    for batch in batches[:100]:
        estimator.observe(*batch)
    estimator.save(path)
    restored = OnlineAcceptanceEstimator.load(path)
    for batch in batches[100:]:
        estimator.observe(*batch)
        restored.observe(*batch)
    assert torch.equal(restored.slope, estimator.slope)
    assert torch.equal(restored.intercepts, estimator.intercepts)
    assert restored.forgetting == 0.5
    broken = estimator._sums._replace(counts=torch.full_like(estimator._sums.counts, torch.nan))
    estimator._sums = broken
    estimator.save(path)
    with pytest.raises(ValueError, match="'counts' is missing, misshapen or not finite"):
        OnlineAcceptanceEstimator.load(path)


def test_running_quality_is_that_of_scikit_learn():
    estimator = OnlineAcceptanceEstimator(num_positions=K, refit_interval=100, quality=True)
    rows, predicted = [], []
    for batch in traffic(150):
        law = estimator.predict(batch[0])
        for row in range(len(batch[0])):
            for k in range(min(int(batch[1][row]) + 1, int(batch[2][row]))):
                rows.append(int(k < int(batch[1][row])))
                predicted.append(float(law[row, k]))
        estimator.observe(*batch)
    figures = estimator.quality.figures()
    y, p = np.array(rows), np.array(predicted)
    place = np.minimum((p * 10).astype(int), 9)
    ece = sum(abs(y[place == b].sum() - p[place == b].sum()) for b in range(10)) / len(y)
    assert figures.labels == len(y)
    assert figures.auc == pytest.approx(roc_auc_score(y, p), abs=1e-3)
    assert figures.log_loss == pytest.approx(log_loss(y, p), rel=1e-5)
    assert figures.ece == pytest.approx(ece, abs=1e-6)
    assert figures.acceptance == pytest.approx(y.mean())
    estimator.quality.reset()
    assert estimator.quality.figures().labels == 0


@pytest.mark.parametrize("values", [{"num_positions": 0}, {"refit_interval": 0}, {"forgetting": 1.5}])
def test_numbers_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="need num_positions"):
        OnlineAcceptanceEstimator(**{"num_positions": 2, **values})

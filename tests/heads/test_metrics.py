"""Metrics and linear baselines against scikit-learn, SciPy and by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from sklearn.calibration import calibration_curve
from sklearn.metrics import r2_score, roc_auc_score

from ace_learn.heads.metrics import (
    ClassificationMetrics,
    HeadMetrics,
    RegressionMetrics,
    classification,
    expected_calibration_error,
    head_metrics,
    regression,
)


def test_ece_by_hand() -> None:
    target = np.array([True, False, True, True])
    probability = np.array([0.05, 0.05, 0.95, 1.0])
    # first bin: mean 0.05 against frequency 0.5, last bin: mean 0.975 against 1
    assert expected_calibration_error(target, probability) == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)


def test_ece_agrees_with_the_calibration_curve_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    probability = generator.uniform(size=5000)
    target = generator.uniform(size=5000) < probability**2
    frequency, mean = calibration_curve(target, probability, n_bins=10)
    counts = np.histogram(probability, bins=10, range=(0, 1))[0]
    expected = (np.abs(frequency - mean) * counts).sum() / counts.sum()
    assert expected_calibration_error(target, probability) == pytest.approx(expected)


def test_soft_targets_are_binarised_for_the_curve_and_taken_as_they_are_for_calibration() -> None:
    target = np.array([0.0, 0.25, 0.5, 1.0])
    probability = np.array([0.05, 0.35, 0.15, 0.95])
    metrics = classification(target, probability)
    # positive: the last two; one of the four pairs is in the wrong order
    assert metrics.auc == pytest.approx(3 / 4)
    assert metrics.ece == pytest.approx((0.05 + 0.10 + 0.35 + 0.05) / 4)
    assert metrics.base_rate == pytest.approx(1.75 / 4)


def test_every_signal_is_measured_on_its_defined_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    signals = torch.rand(300, 4, generator=generator)
    targets = (signals + 0.3 * torch.randn(300, 4, generator=generator)).clamp(0, 1)
    signals[:, 2] *= 1000
    targets[:, 2] *= 1000
    targets[:, 3] = (targets[:, 3] > 0.5).float()
    targets[::2, 3] = math.nan
    targets[:5, 1] = math.nan
    metrics = head_metrics(signals, targets)
    known, predicted = targets.double().numpy(), signals.double().numpy()
    assert metrics.confidence.r2 == pytest.approx(r2_score(known[:, 0], predicted[:, 0]))
    assert (metrics.confidence.rows, metrics.progress.rows, metrics.consistency.rows) == (300, 295, 150)
    ranks = [rankdata(column[5:, 1]) for column in (known, predicted)]
    assert metrics.progress.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert metrics.remaining.r2 == pytest.approx(r2_score(known[:, 2], predicted[:, 2]))
    assert metrics.remaining_log.r2 == pytest.approx(r2_score(np.log1p(known[:, 2]), np.log1p(predicted[:, 2])))
    assert metrics.remaining_log.spearman == pytest.approx(metrics.remaining.spearman)
    assert metrics.consistency.auc == pytest.approx(roc_auc_score(known[1::2, 3], predicted[1::2, 3]))
    assert HeadMetrics.from_json(metrics.to_json()) == metrics


def test_what_cannot_be_measured_is_none() -> None:
    nothing, ones, numbers = np.empty(0), np.ones(3), np.arange(3.0)
    assert regression(nothing, nothing) == RegressionMetrics(None, None, 0)
    assert regression(ones, numbers) == RegressionMetrics(None, None, 3)
    assert regression(numbers, ones) == RegressionMetrics(0.0, None, 3)
    assert classification(nothing > 0, nothing) == ClassificationMetrics(None, None, None, 0)
    assert classification(ones > 0, ones * 0.75) == ClassificationMetrics(None, 0.25, 1.0, 3)

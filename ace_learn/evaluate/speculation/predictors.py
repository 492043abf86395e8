"""Fitted predictors of acceptance, by scikit-learn, and how good they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ace_learn.artifacts import JSON


class Events(NamedTuple):
    """Judged drafts, one a row."""

    position: Int[ndarray, " n"]
    label: Int[ndarray, " n"]


class Fitted(NamedTuple):
    """A logistic regression with one slope and an intercept per position."""

    slope: float
    intercepts: Float[ndarray, " K"]

    def __call__(self, feature: Float[ndarray, " n"], position: Int[ndarray, " n"]) -> Float[ndarray, " n"]:
        """Predicted acceptance."""
        return np.asarray(1.0 / (1.0 + np.exp(-(self.slope * feature + self.intercepts[position]))))


def fit(feature: Float[ndarray, " n"], events: Events, width: int) -> Fitted:
    """Fits the two, almost without a penalty; a position that was never judged has the intercept 0."""
    design = np.concatenate((feature[:, None], np.eye(width)[events.position]), axis=1)
    model = LogisticRegression(C=1e4, fit_intercept=False, max_iter=500, tol=1e-6).fit(design, events.label)
    return Fitted(float(model.coef_[0, 0]), model.coef_[0, 1:])


def fit_head(
    states: Float[ndarray, "n H"], events: Events, width: int, test: Float[ndarray, "m H"], position: Int[ndarray, " m"]
) -> Float[ndarray, " m"]:
    """A confidence head: one hidden layer on states (or more) and the position; returns its test predictions."""
    head = MLPClassifier(
        (64,), early_stopping=True, max_iter=200, random_state=0, batch_size=min(512, max(1, len(states) // 2))
    )
    model = make_pipeline(StandardScaler(), head)
    model.fit(np.concatenate((states, np.eye(width)[events.position]), axis=1), events.label)
    return np.asarray(model.predict_proba(np.concatenate((test, np.eye(width)[position]), axis=1))[:, 1])


def ece(label: Int[ndarray, " n"], predicted: Float[ndarray, " n"]) -> float:
    """Expected calibration error over 10 bins of equal width."""
    place = np.minimum((predicted * 10).astype(int), 9)
    gaps = np.bincount(place, weights=label - predicted, minlength=10)
    return float(np.abs(gaps).sum() / len(label))


def quality(events: Events, predicted: Float[ndarray, " n"]) -> dict[str, JSON]:
    """AUC, log-loss and ECE; AUC is None where all labels are alike."""
    safe = np.clip(predicted, 1e-6, 1.0 - 1e-6)
    mixed = 0 < events.label.sum() < len(events.label)
    return {
        "auc": float(roc_auc_score(events.label, predicted)) if mixed else None,
        "log_loss": float(log_loss(events.label, safe, labels=[0, 1])),
        "ece": ece(events.label, predicted),
        "acceptance": float(events.label.mean()),
        "labels": len(events.label),
    }

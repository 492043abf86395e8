"""Linear models of scikit-learn on the features that a head reads, to hold the head against."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor

from ace_learn.heads.data import FeatureTable, Statistics
from ace_learn.heads.metrics import POSITIVE, HeadMetrics, head_metrics
from ace_learn.signals import BY_NAME, LEARNED

#: Training rows that the baselines are fit on at most, drawn at random; more change little and cost much.
MAX_ROWS = 20_000

RIDGE_ALPHA = 1.0
LOGISTIC_C = 0.1


def linear_baseline(train: FeatureTable, validation: FeatureTable, statistics: Statistics, *, seed: int) -> HeadMetrics:
    """Ridge regression for the numeric signals and logistic regression for consistency, measured as heads are.

    Ridge predicts confidence and progress as they are (clipped to [0, 1]) and remaining in log(1 + tokens).

    Args:
        train: Rows to fit on; at most `MAX_ROWS` of them are used.
        validation: Rows to measure on.
        statistics: Of the train rows, for normalisation.
        seed: Of the choice of rows.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = train.batch(torch.randperm(len(train), generator=generator)[:MAX_ROWS])
    std = torch.where(statistics.std > 0, statistics.std, 1.0)
    inputs = ((batch.features - statistics.mean) / std).float().numpy()
    targets = batch.targets.numpy()
    models = [_fit(name, inputs, targets[:, index]) for index, name in enumerate(LEARNED)]
    signals = [
        _predict(models, ((chunk.features - statistics.mean) / std).float().numpy()) for chunk in validation.chunks()
    ]
    return head_metrics(torch.cat(signals), validation.targets)


class _Constant:
    """Predicts one number, where the training rows leave nothing to learn."""

    def __init__(self, value: float) -> None:
        self._value = value

    def predict(self, inputs: Float[ndarray, "n F"]) -> Float[ndarray, " n"]:
        return np.full(inputs.shape[0], self._value)


def _fit(
    name: str, inputs: Float[ndarray, "n F"], target: Float[ndarray, " n"]
) -> Ridge | LogisticRegression | _Constant:
    defined = ~np.isnan(target)
    rows, known = inputs[defined], target[defined]
    classes = known >= POSITIVE if name == "consistency" else known
    if known.size == 0 or classes.min() == classes.max():
        value = float(known.mean()) if known.size else 0.0
        return _Constant(np.log1p(value) if BY_NAME[name].score_transform == "log1p" else value)
    if name == "consistency":
        return LogisticRegression(C=LOGISTIC_C, max_iter=2000).fit(rows, classes)
    return Ridge(alpha=RIDGE_ALPHA).fit(rows, np.log1p(known) if BY_NAME[name].score_transform == "log1p" else known)


def _predict(
    models: list[Ridge | LogisticRegression | _Constant], inputs: Float[ndarray, "n F"]
) -> Float[Tensor, "n S"]:
    columns = []
    for name, model in zip(LEARNED, models, strict=True):
        if isinstance(model, LogisticRegression):
            values = model.predict_proba(inputs)[:, 1]
        elif BY_NAME[name].score_transform == "log1p":
            values = np.expm1(np.clip(model.predict(inputs), 0, 20))
        else:
            values = np.clip(model.predict(inputs), 0, 1)
        columns.append(torch.from_numpy(np.asarray(values, dtype=np.float64)))
    return torch.stack(columns, dim=1)

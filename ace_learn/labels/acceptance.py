"""The acceptance estimator of a data set: fitted on a few train problems, and kept for all of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import Target
from ace_learn.speculation.adaptive import AdaptiveConfig, AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator

FILE_NAME = "acceptance.safetensors"

_PROBLEMS, _TOGETHER = 128, 16
"""About eight rounds of the estimator, in traces of some hundred tokens."""


def kept_estimator(
    folder: Path, target: Target, drafter: Drafter, requests: Sequence[Request], *, sampling: Sampling, length: int
) -> OnlineAcceptanceEstimator:
    """The estimator that a data set keeps; fitted and written where its folder has none yet.

    In an engine the coefficients move with every hundred steps. A data set's traces are decoded without speculation, so
    that none of its rows can move them: they are those that an engine reaches on the first problems of the train split.

    Args:
        folder: The data set folder.
        target: The model that thinks.
        drafter: The one whose states the rows read.
        requests: Those of the train split.
        sampling: That of the traces.
        length: Draft length.

    Raises:
        ValueError: The file in the folder holds no estimator.
    """
    path = folder / FILE_NAME
    if not path.exists():
        estimator = AdaptiveConfig().estimator(length, target.device)
        engine = HFEngine(
            target,
            sampling=sampling,
            drafter=drafter,
            num_draft_tokens=length,
            verifier=AdaptiveVerifier(estimator=estimator, costs=None),
            batch_size=_TOGETHER,
        )
        engine.generate(requests[:_PROBLEMS])
        estimator.save(path)
    return OnlineAcceptanceEstimator.load(path, device=target.device)

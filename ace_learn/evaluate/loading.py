"""From folders on disk to an evaluation: a head on a data set's features, and its policy against the baselines."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.compare import Evaluation, Splits, compare_methods
from ace_learn.evaluate.learned import Risk, Scope, policy_exits
from ace_learn.evaluate.metrics import LatencyModel
from ace_learn.evaluate.signals import SignalReader, smoothed_signals
from ace_learn.evaluate.traces import load_traces
from ace_learn.exit.policy import load_policy
from ace_learn.features import FeatureStore
from ace_learn.heads.export import load_head
from ace_learn.models.identity import TargetIdentity


class OpenedHead(NamedTuple):
    """A head on the features of a data set, and what a certificate made with them holds for."""

    reader: SignalReader
    scope: Scope


def open_head(dataset: Path, head_folder: Path) -> OpenedHead:
    """Open a head on the features of a data set.

    Args:
        dataset: folder written by `build`.
        head_folder: folder written by `train` or `calibrate`.

    Raises:
        ValueError: a folder is incomplete, or the head was trained for another target than the data set's.
    """
    store = FeatureStore(dataset)
    identity = TargetIdentity.from_json(store.dataset.fields("target").data)
    loaded = load_head(head_folder, expect=identity)
    scope = Scope(
        data_sha256=store.sha256,
        model_fingerprint=identity.fingerprint,
        sampling=store.dataset.fields("sampling").data,
    )
    return OpenedHead(SignalReader(store, loaded.head, loaded.spec.sources), scope)


def replay_exits(dataset: Path, head_folder: Path, split: str) -> Int[ndarray, " n"]:
    """Exit index of every problem of a split under the policy of a calibrated head folder.

    Args:
        dataset: folder written by `build`.
        head_folder: folder written by `calibrate`.
        split: name of the split.

    Returns:
        Exit indices in ascending order of the problem numbers; excluded problems have none.

    Raises:
        ValueError: a folder is incomplete, or the head was trained for another target than the data set's.
    """
    policy, traces = load_policy(head_folder), load_traces(dataset, split)
    reader = open_head(dataset, head_folder).reader
    smoothed = smoothed_signals(reader, traces, ewma=policy.ewma, smooth_over=policy.smooth_over)
    exits, *_ = policy_exits([policy], smoothed, traces)
    return np.asarray(exits)


def evaluate_policy(
    dataset: Path, head_folder: Path, *, risk: Risk, latency: LatencyModel, bootstrap: Bootstrap
) -> Evaluation:
    """Compare the policy of a calibrated head folder with the baselines on the test split of a data set.

    Args:
        dataset: folder written by `build`.
        head_folder: folder written by `calibrate`, with `policy.json`.
        risk: what the baselines are tuned to.
        latency: measured latency model.
        bootstrap: resampling settings.

    Raises:
        ValueError: a folder is incomplete, or the head was trained for another target than the data set's.
    """
    policy = load_policy(head_folder)
    reader = open_head(dataset, head_folder).reader
    splits = Splits(*(load_traces(dataset, split) for split in Splits._fields))
    smoothed = smoothed_signals(reader, splits.test, ewma=policy.ewma, smooth_over=policy.smooth_over)
    return compare_methods(splits, policy, smoothed, risk=risk, latency=latency, bootstrap=bootstrap)

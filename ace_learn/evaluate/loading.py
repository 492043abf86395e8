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
from ace_learn.features import FeatureStore, verify_shards
from ace_learn.heads.export import LoadedHead, load_head, load_own_policy
from ace_learn.models.identity import TargetIdentity


class OpenedHead(NamedTuple):
    """A head on the features of its own data set, and what a certificate made with them holds for."""

    loaded: LoadedHead
    reader: SignalReader
    scope: Scope


def open_head(dataset: Path, head_folder: Path) -> OpenedHead:
    """Open a head on the features of the data set that it was trained on, after a look at every shard's hashes.

    Another data set is refused: the training problems may be among its calibration and test problems.

    Args:
        dataset: folder written by `build`.
        head_folder: folder written by `train` or `calibrate`.

    Raises:
        ValueError: a folder is incomplete or damaged, or the head was trained for another target than the data set's,
            or on another data set.
    """
    store = FeatureStore(dataset)
    identity = TargetIdentity.from_json(store.dataset.fields("target").data)
    loaded = load_head(head_folder, expect=identity)
    if loaded.card.data_sha256 != store.sha256:
        raise ValueError(
            f"the head in {head_folder} was trained on another data set ({loaded.card.data_sha256}) than {dataset} "
            f"({store.sha256}), whose calibration and test problems may be among its training problems; name the data "
            "set that it was trained on, or train a head on this one"
        )
    verify_shards(dataset)
    scope = Scope(
        data_sha256=store.sha256,
        head_sha256=loaded.weights_sha256,
        model_fingerprint=identity.fingerprint,
        sampling=store.dataset.fields("sampling").data,
        draft=store.spec.draft,
    )
    return OpenedHead(loaded, SignalReader(store, loaded.head, loaded.spec.sources), scope)


def replay_exits(dataset: Path, head_folder: Path, split: str) -> Int[ndarray, " n"]:
    """Exit index of every problem of a split under the policy of a calibrated head folder.

    Args:
        dataset: folder written by `build`.
        head_folder: folder written by `calibrate`.
        split: name of the split.

    Returns:
        Exit indices in ascending order of the problem numbers; excluded problems have none.

    Raises:
        ValueError: as `open_head`, or the policy was certified with another head.
    """
    opened = open_head(dataset, head_folder)
    policy, traces = load_own_policy(opened.loaded), load_traces(dataset, split)
    opened.reader.require(policy.signals)
    smoothed = smoothed_signals(opened.reader, traces, ewma=policy.ewma, smooth_over=policy.smooth_over)
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
        ValueError: as `open_head`, or the policy was certified with another head.
    """
    opened = open_head(dataset, head_folder)
    policy = load_own_policy(opened.loaded)
    splits = Splits(*(load_traces(dataset, split) for split in Splits._fields))
    opened.reader.require(policy.signals)
    smoothed = smoothed_signals(opened.reader, splits.test, ewma=policy.ewma, smooth_over=policy.smooth_over)
    return compare_methods(splits, policy, smoothed, risk=risk, latency=latency, bootstrap=bootstrap)

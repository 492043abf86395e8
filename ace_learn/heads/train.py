"""Trains a signal head: data set folder in, head folder out; resumable, one writer, atomic."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.artifacts import (
    ProvenanceRecorder,
    clean_stale,
    dump_config,
    publish,
    read_fields,
    write_json,
    write_text,
    writer_lock,
)
from ace_learn.features import FeatureStore, verify_shards
from ace_learn.heads.baselines import linear_baseline
from ace_learn.heads.config import TrainConfig
from ace_learn.heads.data import FeatureData, FeatureTable, Statistics, feature_statistics
from ace_learn.heads.export import CONFIG_NAME, HeadCard, save_head
from ace_learn.heads.head import SignalHead
from ace_learn.heads.history import EpochLosses
from ace_learn.heads.losses import class_weights
from ace_learn.heads.metrics import HeadMetrics, head_metrics
from ace_learn.heads.module import HeadModule
from ace_learn.heads.report import TrainReport, draw_history
from ace_learn.heads.runs import (
    check_device,
    claim_output,
    expected_warnings,
    is_finished,
    make_trainer,
    read_checkpoint,
)
from ace_learn.models.identity import TargetIdentity

_METRICS_NAME = "metrics.json"


class Fitted(NamedTuple):
    """What fitting leaves.

    Attributes:
        head: The head with the weights of the best epoch, in evaluation mode, on the CPU.
        history: Losses and weights of each epoch.
        best_epoch: Counted from 0.
    """

    head: SignalHead
    history: tuple[EpochLosses, ...]
    best_epoch: int


def train_head(config: TrainConfig) -> TrainReport:
    """Trains a head and writes its folder.

    OUTPUT gets config.json, model.safetensors, metrics.json, curve.png, config.yaml, provenance.json, and logs/
    (TensorBoard) and checkpoints/ while and after training. config.json comes last: without it there is no head.
    A run that was killed goes on from its last finished epoch, with the result that it would have had; a finished one
    is reported again.

    Args:
        config: The run.

    Returns:
        Metrics on the validation split, of the head and of linear models on the same features.

    Raises:
        ValueError: The data set is damaged or lacks the sources, OUTPUT belongs to another run or is being written,
            there are no such devices, or training diverged.
        OSError: A file cannot be read or written.
    """
    check_device(config.trainer)
    store = FeatureStore(config.dataset, minimal=config.minimal)
    spec = store.spec.subset(config.sources)
    identity = TargetIdentity.from_json(store.dataset.fields("target").data)
    if not (config.output / CONFIG_NAME).exists():
        verify_shards(config.dataset)
    with writer_lock(config.output):
        clean_stale(config.output)
        claim_output(
            config.output,
            {**config.to_json(), "data_sha256": store.sha256},
            TrainConfig(dataset=config.dataset, output=config.output).to_json(),
            last=CONFIG_NAME,
        )
        if (config.output / CONFIG_NAME).exists():
            return TrainReport.from_json(read_fields(config.output / _METRICS_NAME))
        with ProvenanceRecorder({"dataset": config.dataset / "dataset.json"}) as provenance:
            data = _feature_data(config, store)
            statistics = feature_statistics(data.train_table.chunks())
            fitted = fit_head(config, data, statistics)
            report = _report(config, data, statistics, fitted)
            card = HeadCard(
                config=config.head,
                spec=spec,
                identity=identity,
                data_sha256=store.sha256,
                rows=config.rows,
                metrics=report.head.to_json(),
            )
            _export(config, fitted, report, card, provenance)
    return report


def fit_head(config: TrainConfig, data: FeatureData, statistics: Statistics) -> Fitted:
    """Fits a head, from OUTPUT/checkpoints/last.ckpt where there is one.

    Args:
        config: The run.
        data: Train and validation rows.
        statistics: Of the train rows, for normalisation.

    Raises:
        ValueError: A checkpoint is damaged, or training diverged.
    """
    checkpoints = config.output / "checkpoints"
    last, best = checkpoints / "last.ckpt", checkpoints / "best.ckpt"
    module = _module(config, data, statistics)
    resume = last.exists()
    if not (resume and is_finished(last, max_epochs=config.max_epochs, patience=config.patience)):
        with expected_warnings():
            trainer = make_trainer(
                config.trainer, config.output, max_epochs=config.max_epochs, patience=config.patience
            )
            trainer.fit(module, datamodule=data, ckpt_path=last if resume else None, weights_only=True)
    module.on_load_checkpoint(read_checkpoint(last))
    weights = read_checkpoint(best)["state_dict"]
    assert isinstance(weights, dict), "a checkpoint without weights"
    module.load_state_dict(weights)
    losses = [entry["validation"] for entry in module.history]
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(
            f"training diverged: the validation loss of epoch {len(losses)} is {losses[-1]}; "
            f"lower optimizer.lr (now {config.optimizer.lr}), or check the features, and choose another output folder"
        )
    return Fitted(module.head.cpu().eval(), tuple(module.history), losses.index(min(losses)))


@torch.inference_mode()
def predict(head: SignalHead, table: FeatureTable) -> Float[Tensor, "n S"]:
    """The signals of all rows of a table, in natural units."""
    return torch.cat([head(chunk.features) for chunk in table.chunks()])


def _feature_data(config: TrainConfig, store: FeatureStore) -> FeatureData:
    return FeatureData(
        store,
        sources=config.sources,
        rows=config.rows,
        batch_size=config.batch_size,
        seed=config.seed,
        memory_limit=int(config.memory_limit_gib * 2**30),
        span=config.span,
    )


def _module(config: TrainConfig, data: FeatureData, statistics: Statistics) -> HeadModule:
    torch.manual_seed(config.seed)
    head = SignalHead(config.head, statistics.mean.shape[0])
    head.set_normalisation(statistics.mean.float(), statistics.std.float())
    balanced = config.losses.consistency_balance == "balanced"
    return HeadModule(
        head,
        losses=config.losses,
        weighting=config.weighting,
        consistency_weights=class_weights(data.train_table.targets) if balanced else None,
        optimizer=config.optimizer,
        seed=config.seed,
    )


def _report(config: TrainConfig, data: FeatureData, statistics: Statistics, fitted: Fitted) -> TrainReport:
    validation = data.validation_table
    return TrainReport(
        head=_measure(fitted.head, validation),
        baseline=linear_baseline(data.train_table, validation, statistics, seed=config.seed),
        history=fitted.history,
        best_epoch=fitted.best_epoch,
        rows=(len(data.train_table), len(validation)),
    )


def _measure(head: SignalHead, table: FeatureTable) -> HeadMetrics:
    return head_metrics(predict(head, table), table.targets)


def _export(
    config: TrainConfig, fitted: Fitted, report: TrainReport, card: HeadCard, provenance: ProvenanceRecorder
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="export.tmp-", dir=config.output))
    try:
        save_head(temporary, fitted.head, card)
        write_json(temporary / _METRICS_NAME, report.to_json())
        draw_history(temporary / "curve.png", fitted.history, best_epoch=fitted.best_epoch)
        write_text(temporary / "config.yaml", dump_config(config))
        provenance.write(temporary)
        publish(temporary, config.output, last=CONFIG_NAME)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

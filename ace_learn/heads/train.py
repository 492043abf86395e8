"""Trains a signal head: data set folder in, head folder out; resumable, one writer, atomic."""

from __future__ import annotations

import math
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from ace_learn.artifacts import (
    JSON,
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
from ace_learn.heads.config import TrainConfig, TrainerConfig
from ace_learn.heads.data import FeatureData, FeatureTable, Statistics, feature_statistics
from ace_learn.heads.export import CONFIG_NAME, HeadCard, save_head
from ace_learn.heads.head import SignalHead
from ace_learn.heads.history import EpochLosses, epoch_from_json
from ace_learn.heads.losses import class_weights
from ace_learn.heads.metrics import HeadMetrics, head_metrics
from ace_learn.heads.module import VALIDATION_LOSS, HeadModule
from ace_learn.heads.report import TrainReport, draw_history
from ace_learn.models.identity import TargetIdentity

_RUN_NAME = "run.json"
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
    _check_device(config.trainer)
    store = FeatureStore(config.dataset, minimal=config.minimal)
    spec = store.spec.subset(config.sources)
    identity = TargetIdentity.from_json(store.dataset.fields("target").data)
    if not (config.output / CONFIG_NAME).exists():
        verify_shards(config.dataset)
    with writer_lock(config.output):
        clean_stale(config.output)
        _claim(config, store.sha256)
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
    if not (resume and _is_finished(last, config)):
        with _expected_warnings():
            _trainer(config, checkpoints).fit(
                module, datamodule=data, ckpt_path=last if resume else None, weights_only=True
            )
    module.on_load_checkpoint(_read_checkpoint(last))
    weights = _read_checkpoint(best)["state_dict"]
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


def _check_device(config: TrainerConfig) -> None:
    if _on_cpu(config):
        return
    count = torch.accelerator.device_count()
    if config.devices > count:
        raise ValueError(
            f"trainer.devices is {config.devices}, but of {config.accelerator} torch sees {count}; "
            "choose fewer, or trainer.accelerator cpu"
        )


def _on_cpu(config: TrainerConfig) -> bool:
    return config.accelerator == "cpu" or (config.accelerator == "auto" and not torch.accelerator.is_available())


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


def _trainer(config: TrainConfig, checkpoints: Path) -> Trainer:
    several = config.trainer.strategy == "ddp" or config.trainer.devices > 1
    return Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        # Spawned processes only fit; this one, which holds the lock, writes the head.
        strategy="ddp_spawn" if several else "auto",
        use_distributed_sampler=False,  # the loaders give every process its part
        precision=config.trainer.precision,
        enable_progress_bar=config.trainer.progress_bar,
        enable_model_summary=False,
        max_epochs=config.max_epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        logger=TensorBoardLogger(config.output, name="", version="logs"),
        callbacks=[
            EarlyStopping(VALIDATION_LOSS, patience=config.patience, check_on_train_epoch_end=True),
            _checkpoint(checkpoints, "best", monitor=VALIDATION_LOSS),
            _checkpoint(checkpoints, "last", monitor=None),
        ],
    )


def _checkpoint(folder: Path, name: str, *, monitor: str | None) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename=name, monitor=monitor, save_on_train_epoch_end=True, enable_version_counter=False
    )


@contextmanager
def _expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # That the checkpoints are there already is the point of resuming.
        warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
        # Lightning 2.6 makes a LeafSpec, which torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
        yield


def _read_checkpoint(path: Path) -> dict[str, JSON]:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is missing or damaged; delete {path.parent} and run train again")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(checkpoint, dict), "a checkpoint of another program"
    return checkpoint


def _is_finished(last: Path, config: TrainConfig) -> bool:
    """Whether the last epoch of a run is behind it, so that it was killed after fitting."""
    checkpoint = _read_checkpoint(last)
    history = checkpoint["history"]
    assert isinstance(history, list), "a checkpoint of another program"
    losses = [epoch_from_json(entry, where=f"{last}: history")["validation"] for entry in history]
    if not math.isfinite(losses[-1]):
        return True
    since_best = len(losses) - 1 - losses.index(min(losses))
    return len(losses) >= config.max_epochs or since_best >= config.patience


def _claim(config: TrainConfig, data_sha256: str) -> None:
    """Marks OUTPUT as this run's, or checks that it is.

    Raises:
        ValueError: OUTPUT belongs to a run of another config or other data.
    """
    claim: dict[str, JSON] = {**config.to_json(), "data_sha256": data_sha256}
    for key in ("dataset", "output", "trainer"):  # where a run happens does not make it another one
        del claim[key]
    path = config.output / "checkpoints" / _RUN_NAME
    if not path.exists():
        if (config.output / CONFIG_NAME).exists():
            raise ValueError(f"{config.output} holds a head whose run is unknown; choose another output folder")
        write_json(path, claim)
        return
    found = read_fields(path).data
    # A field that came later has its default in the runs before it.
    there = _filled(found, TrainConfig(dataset=config.dataset, output=config.output).to_json(), claim)
    differences = [
        f"{key} is {there.get(key)!r} there, {claim.get(key)!r} here"
        for key in sorted({*there, *claim})
        if there.get(key) != claim.get(key)
    ]
    if differences:
        raise ValueError(
            f"{config.output} belongs to another run: {'; '.join(differences)}. "
            "Choose another output folder, or delete this one"
        )


def _filled(found: Mapping[str, JSON], defaults: Mapping[str, JSON], keys: Iterable[str]) -> dict[str, JSON]:
    """What was found, with the defaults of those keys, and of those in its tables, that it lacks."""
    filled: dict[str, JSON] = {**{key: defaults[key] for key in keys if key in defaults}, **found}
    for key, value in filled.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            filled[key] = {**default, **value}
    return filled


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

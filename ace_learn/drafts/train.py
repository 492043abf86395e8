"""Trains a draft module: data set folder in, draft folder out; resumable, one writer, atomic."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
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
from ace_learn.drafts.adapters import Adapters
from ace_learn.drafts.config import DraftTrainConfig
from ace_learn.drafts.data import Trace, TraceData, read_traces
from ace_learn.drafts.draft import fresh_eagle3, fresh_mtp, loaded_draft
from ace_learn.drafts.losses import TokenSums
from ace_learn.drafts.module import DraftModule
from ace_learn.drafts.report import DraftMetrics, DraftReport
from ace_learn.drafts.vocabulary import choose_vocabulary, token_counts
from ace_learn.features import FeatureStore, verify_shards
from ace_learn.heads.head import natural
from ace_learn.heads.history import EpochLosses
from ace_learn.heads.losses import class_weights
from ace_learn.heads.metrics import HeadMetrics, head_metrics
from ace_learn.heads.report import draw_history
from ace_learn.heads.runs import (
    check_device,
    claim_output,
    expected_warnings,
    is_finished,
    make_trainer,
    read_checkpoint,
)
from ace_learn.models.draft_files import CONFIG_NAME, SIGNAL_FOLDER, save_draft
from ace_learn.models.draft_module import Draft
from ace_learn.models.identity import TargetIdentity
from ace_learn.models.target import Target, load_target
from ace_learn.signals import LEARNED

_METRICS_NAME = "metrics.json"


class Fitted(NamedTuple):
    """What fitting leaves.

    Attributes:
        draft: The draft with the weights of the best epoch, adapters merged, in evaluation mode.
        history: Losses and weights of each epoch.
        best_epoch: Counted from 0.
        metrics: On the validation split.
    """

    draft: Draft
    history: tuple[EpochLosses, ...]
    best_epoch: int
    metrics: DraftMetrics


def train_draft(config: DraftTrainConfig) -> DraftReport:
    """Trains a draft and writes its folder.

    OUTPUT gets config.json and model.safetensors (which vLLM loads with `method: eagle3` or `mtp`), ace_head/ (the
    signal rows), metrics.json, curve.png, config.yaml, provenance.json, and logs/ (TensorBoard) and checkpoints/ while
    and after training. config.json comes last: without it there is no draft. A run that was killed goes on from its
    last finished epoch, with the result that it would have had; a finished one is reported again.

    Args:
        config: The run.

    Returns:
        Metrics on the validation split.

    Raises:
        ValueError: The data set is damaged, or is one of another target; OUTPUT belongs to another run or is being
            written; there are no such devices, or training diverged.
        OSError: A file cannot be read or written.
    """
    check_device(config.trainer)
    store = FeatureStore(config.dataset, minimal="built" if config.signals is None else config.signals.minimal)
    finished = (config.output / CONFIG_NAME).exists()
    if not finished:
        verify_shards(config.dataset)
    with writer_lock(config.output):
        clean_stale(config.output)
        bare = DraftTrainConfig(
            kind=config.kind, dataset=config.dataset, output=config.output, target=config.target
        ).to_json()
        claim_output(config.output, {**config.to_json(), "data_sha256": store.sha256}, bare, last=CONFIG_NAME)
        if finished:
            return DraftReport.from_json(read_fields(config.output / _METRICS_NAME))
        with ProvenanceRecorder({"dataset": config.dataset / "dataset.json"}) as provenance:
            target = load_target(config.target)
            _check_target(store, target)
            return _train(config, store, target, provenance)


def _train(
    config: DraftTrainConfig, store: FeatureStore, target: Target, provenance: ProvenanceRecorder
) -> DraftReport:
    train, validation = (
        read_traces(store, split, max_tokens=min(config.max_tokens, target.context_length))
        for split in ("train", "validation")
    )
    data = TraceData(train.traces, validation.traces, batch_size=config.batch_size, seed=config.seed)
    fitted = fit_draft(config, data, target)
    counts = token_counts(train.traces, target.vocab_size)
    known = counts[fitted.draft.vocabulary.cpu()].sum()
    report = DraftReport(
        draft=fitted.metrics,
        history=fitted.history,
        best_epoch=fitted.best_epoch,
        traces=(len(train.traces), len(validation.traces)),
        cut=train.cut + validation.cut,
        parameters=sum(weight.numel() for weight in fitted.draft.parameters()),
        coverage=float(known / counts.sum()),
    )
    _export(config, fitted, report, target.identity, provenance)
    return report


def fit_draft(config: DraftTrainConfig, data: TraceData, target: Target) -> Fitted:
    """Fits a draft, from OUTPUT/checkpoints/last.ckpt where there is one.

    Args:
        config: The run.
        data: Train and validation traces.
        target: The model that it drafts for.

    Raises:
        ValueError: A checkpoint is damaged, sizes do not fit together, or training diverged.
    """
    checkpoints = config.output / "checkpoints"
    last, best = checkpoints / "last.ckpt", checkpoints / "best.ckpt"
    torch.manual_seed(config.seed)
    draft = make_draft(config, target, data.train_traces)
    adapters = None if config.lora is None else Adapters(draft, config.lora)
    module = _module(config, draft, data, target)
    resume = last.exists()
    if not (resume and is_finished(last, max_epochs=config.max_epochs, patience=config.patience)):
        with expected_warnings():
            trainer = make_trainer(
                config.trainer,
                config.output,
                max_epochs=config.max_epochs,
                patience=config.patience,
                gradient_clip=config.optimizer.gradient_clip,
            )
            trainer.fit(module, datamodule=data, ckpt_path=last if resume else None, weights_only=True)
    module.on_load_checkpoint(read_checkpoint(last))
    weights = read_checkpoint(best)["state_dict"]
    assert isinstance(weights, dict), "a checkpoint without weights"
    module.load_state_dict(weights)
    losses = [entry["validation"] for entry in module.history]
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(
            f"training diverged: the validation loss of epoch {len(losses)} is {losses[-1]}; lower optimizer.lr (now "
            f"{config.optimizer.lr}) and optimizer.matrix_rate, and choose another output folder"
        )
    module.to(target.device).eval()
    if adapters is not None:
        adapters.merge()
    metrics = _measure(module, data, target)
    return Fitted(draft, tuple(module.history), losses.index(min(losses)), metrics)


def make_draft(config: DraftTrainConfig, target: Target, train: Sequence[Trace]) -> Draft:
    """The draft that a run starts from.

    Args:
        config: The run.
        target: The model that it drafts for.
        train: Its traces choose the draft vocabulary.

    Raises:
        ValueError: Sizes do not fit together, or start_from holds no such draft.
    """
    signals = () if config.signals is None else LEARNED
    if config.start_from is not None:
        return loaded_draft(config.start_from, target, config.kind, signals=signals)
    if config.kind == "mtp":
        return fresh_mtp(config.shape, target, signals=signals).float()
    vocabulary = choose_vocabulary(
        token_counts(train, target.vocab_size),
        config.shape.vocab_size or target.vocab_size,
        always=[*target.markers.start, *target.markers.end, *target.stop_ids],
    )
    return fresh_eagle3(config.shape, target, vocabulary, signals=signals).float()


def _module(config: DraftTrainConfig, draft: Draft, data: TraceData, target: Target) -> DraftModule:
    signals = config.signals
    balanced = signals is not None and signals.losses.consistency_balance == "balanced"
    return DraftModule(
        draft,
        target,
        unrolling=config.unrolling,
        signals=signals,
        optimizer=config.optimizer,
        consistency_weights=_class_weights(data.train_traces) if balanced else None,
        freeze_draft=config.freeze_draft,
        seed=config.seed,
    )


def _class_weights(traces: Sequence[Trace]) -> Tensor:
    return class_weights(torch.cat([trace.targets for trace in traces]))


@torch.no_grad()
def _measure(module: DraftModule, data: TraceData, target: Target) -> DraftMetrics:
    sums: TokenSums | None = None
    raw: list[Tensor] = []
    targets: list[Tensor] = []
    for batch in data.val_dataloader():
        there = type(batch)(*(part.to(target.device) for part in batch))
        outcome = module.outcome(there)
        sums = outcome.tokens if sums is None else sums.plus(outcome.tokens)
        if outcome.signals is not None:
            rows, known = module.signal_rows(outcome.shared[0], there)
            raw.append(rows.cpu())
            targets.append(known.cpu())
    assert sums is not None, "the validation split has a trace"
    return DraftMetrics.of(sums, _signal_metrics(raw, targets) if raw else None)


def _signal_metrics(raw: Sequence[Tensor], targets: Sequence[Tensor]) -> HeadMetrics:
    return head_metrics(natural(torch.cat(list(raw))), torch.cat(list(targets)))


def _check_target(store: FeatureStore, target: Target) -> None:
    built_with = TargetIdentity.from_json(store.dataset.fields("target").data)
    differences = built_with.mismatches(target.identity)
    if differences:
        raise ValueError(
            f"the data set {store.folder} was built with the target {built_with.name}, not with {target.identity.name} "
            f"('here' is the data set's side): {'; '.join(differences)}. Name the data set's target, or build one with "
            "this target"
        )


def _export(
    config: DraftTrainConfig,
    fitted: Fitted,
    report: DraftReport,
    identity: TargetIdentity,
    provenance: ProvenanceRecorder,
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="export.tmp-", dir=config.output))
    shutil.rmtree(config.output / SIGNAL_FOLDER, ignore_errors=True)  # of an export that was killed
    try:
        save_draft(temporary, fitted.draft, identity)
        write_json(temporary / _METRICS_NAME, report.to_json())
        draw_history(temporary / "curve.png", fitted.history, best_epoch=fitted.best_epoch)
        write_text(temporary / "config.yaml", dump_config(config))
        provenance.write(temporary)
        publish(temporary, config.output, last=CONFIG_NAME)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

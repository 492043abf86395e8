"""What runs that train heads and drafts share: one run per folder, the trainer, checkpoints that resume."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from ace_learn.artifacts import JSON, read_fields, write_json
from ace_learn.heads.config import TrainerConfig
from ace_learn.heads.history import epoch_from_json

VALIDATION_LOSS = "validation/loss"
"""The name under which the validation objective is logged and watched."""

_RUN_NAME = "run.json"
_PLACES = ("dataset", "output", "trainer")
"""Where a run happens does not make it another one."""


def check_device(config: TrainerConfig) -> None:
    """Checks that the devices are there.

    Raises:
        ValueError: There are fewer.
    """
    if config.accelerator == "cpu" or (config.accelerator == "auto" and not torch.accelerator.is_available()):
        return
    count = torch.accelerator.device_count()
    if config.devices > count:
        raise ValueError(
            f"trainer.devices is {config.devices}, but of {config.accelerator} torch sees {count}; "
            "choose fewer, or trainer.accelerator cpu"
        )


def claim_output(output: Path, run: Mapping[str, JSON], defaults: Mapping[str, JSON], *, last: str) -> None:
    """Marks a folder as a run's, or checks that it is.

    Args:
        output: The folder.
        run: The config, and the hash of the data.
        defaults: A field that came later has its default in the runs before it.
        last: Name of the file without which the artifact is not finished.

    Raises:
        ValueError: The folder belongs to a run of another config or other data.
    """
    claim = {key: value for key, value in run.items() if key not in _PLACES}
    path = output / "checkpoints" / _RUN_NAME
    if not path.exists():
        if (output / last).exists():
            raise ValueError(f"{output} holds the result of an unknown run; choose another output folder")
        write_json(path, claim)
        return
    there = _filled(read_fields(path).data, defaults, claim)
    differences = [
        f"{key} is {there.get(key)!r} there, {claim.get(key)!r} here"
        for key in sorted({*there, *claim})
        if there.get(key) != claim.get(key)
    ]
    if differences:
        raise ValueError(
            f"{output} belongs to another run: {'; '.join(differences)}. "
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


def make_trainer(
    config: TrainerConfig, output: Path, *, max_epochs: int, patience: int, gradient_clip: float | None = None
) -> Trainer:
    """A trainer that logs to OUTPUT/logs, stops early, and keeps OUTPUT/checkpoints/best.ckpt and last.ckpt."""
    several = config.strategy == "ddp" or config.devices > 1
    checkpoints = output / "checkpoints"
    return Trainer(
        accelerator=config.accelerator,
        devices=config.devices,
        # Spawned processes only fit; this one, which holds the lock, writes the result.
        strategy="ddp_spawn" if several else "auto",
        use_distributed_sampler=False,  # the loaders give every process its part
        precision=config.precision,
        enable_progress_bar=config.progress_bar,
        enable_model_summary=False,
        max_epochs=max_epochs,
        gradient_clip_val=gradient_clip,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        logger=TensorBoardLogger(output, name="", version="logs"),
        callbacks=[
            EarlyStopping(VALIDATION_LOSS, patience=patience, check_on_train_epoch_end=True),
            _checkpoint(checkpoints, "best", monitor=VALIDATION_LOSS),
            _checkpoint(checkpoints, "last", monitor=None),
        ],
    )


def _checkpoint(folder: Path, name: str, *, monitor: str | None) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename=name, monitor=monitor, save_on_train_epoch_end=True, enable_version_counter=False
    )


@contextmanager
def expected_warnings() -> Iterator[None]:
    """Silences what Lightning warns of in every run."""
    with warnings.catch_warnings():
        # That the checkpoints are there already is the point of resuming.
        warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
        # Lightning 2.6 makes a LeafSpec, which torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
        yield


def read_checkpoint(path: Path) -> dict[str, JSON]:
    """Reads a checkpoint; no pickle is executed.

    Raises:
        ValueError: It is missing or damaged.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is missing or damaged; delete {path.parent} and run train again")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(checkpoint, dict), "a checkpoint of another program"
    return checkpoint


def is_finished(last: Path, *, max_epochs: int, patience: int) -> bool:
    """Whether the last epoch of a run is behind it, so that it was killed after fitting."""
    checkpoint = read_checkpoint(last)
    history = checkpoint["history"]
    assert isinstance(history, list), "a checkpoint of another program"
    losses = [epoch_from_json(entry, where=f"{last}: history")["validation"] for entry in history]
    if not math.isfinite(losses[-1]):
        return True
    since_best = len(losses) - 1 - losses.index(min(losses))
    return len(losses) >= max_epochs or since_best >= patience

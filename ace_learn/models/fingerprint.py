"""Names a set of weights by a hash, of a loaded model or of a checkpoint that nothing has loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

_SAMPLES_PER_WEIGHT = 64
_OUTPUT = "lm_head.weight"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over every weight's name, shape and a fixed sample of its values.

    The sample makes it quick on a large model, and any training step changes it. Values are hashed in bfloat16, so that
    the same weights loaded in another dtype keep their fingerprint.
    """
    return _digest({name: _described(weight) for name, weight in model.state_dict().items()})


def checkpoint_fingerprint(folder: Path, *, tied: bool) -> str | None:
    """The fingerprint of the model that transformers would load from a folder, without loading it.

    One weight after another is mapped, and its sampled values read. It agrees with `fingerprint` where the names in the
    files are those of the module tree, as in every folder that `save_pretrained` wrote.

    Args:
        folder: A folder of transformers' layout.
        tied: Whether the output layer shares the embedding's weights (`tie_word_embeddings`), and so is in no file.

    Returns:
        The fingerprint; None where the folder holds no safetensors files, or damaged ones.
    """
    files = _files(folder)
    if not files:
        return None
    weights: dict[str, _Described] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    weights[name] = _described(opened.get_tensor(name))
    except (OSError, SafetensorError):
        return None
    embedding = next((name for name in weights if name.endswith("embed_tokens.weight")), None)
    if tied and embedding is not None:
        weights.setdefault(_OUTPUT, weights[embedding])
    return _digest(weights)


def _files(folder: Path) -> list[Path]:
    """The weight files; an index names them where there are several."""
    if (folder / _INDEX).is_file():
        shards = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted({folder / str(name) for name in shards.values()})
    return [folder / _SINGLE] if (folder / _SINGLE).is_file() else []


class _Described(NamedTuple):
    """What the hash knows of one weight, so that no more than one is held at a time."""

    shape: tuple[int, ...]
    sample: bytes
    """Empty where the values are no floats."""


def _described(weight: Tensor) -> _Described:
    flat = weight.detach().reshape(-1)
    if not flat.is_floating_point():
        return _Described(tuple(weight.shape), b"")
    step = max(1, flat.numel() // _SAMPLES_PER_WEIGHT)
    sample = flat[::step][:_SAMPLES_PER_WEIGHT].to("cpu", torch.bfloat16)
    return _Described(tuple(weight.shape), sample.view(torch.int16).numpy().tobytes())


def _digest(weights: Mapping[str, _Described]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(json.dumps([name, list(weight.shape)]).encode())
        digest.update(weight.sample)
    return digest.hexdigest()

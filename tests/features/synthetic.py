"""A small synthetic data set folder, for the tests of features and heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ace_learn.artifacts import JSON, sha256_file, write_json
from ace_learn.features import SPLITS, FeatureSpec, write_features


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Sizes of a data set whose targets are functions of its features."""

    problems: int = 40
    boundaries: int = 5
    paragraph: int = 3
    hidden_size: int = 6
    aux_layers: tuple[int, ...] = (1, 2)
    shards: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0
    noise: float = 0.0


def target_json(hidden_size: int = 6) -> dict[str, JSON]:
    return {
        "name": "synthetic",
        "fingerprint": "f" * 64,
        "hidden_size": hidden_size,
        "num_layers": 3,
        "vocab_size": 32,
        "markers": {"start": [1], "end": [2]},
        "tables_sha256": "0" * 64,
    }


def make_rows(sizes: Synthetic) -> dict[str, Tensor]:
    """All rows of the data set: every token of every trace, of which each `paragraph`-th is a boundary."""
    generator = torch.Generator().manual_seed(sizes.seed)
    tokens = sizes.boundaries * sizes.paragraph
    count = sizes.problems * tokens
    hidden = torch.randn(count, sizes.hidden_size, generator=generator)
    aux = torch.randn(count, sizes.hidden_size * len(sizes.aux_layers), generator=generator)
    scalars = torch.randn(count, 7, generator=generator)
    weights = torch.randn(4, sizes.hidden_size, generator=generator) / sizes.hidden_size**0.5
    raw = hidden @ weights.T + sizes.noise * torch.randn(count, 4, generator=generator)
    position = torch.arange(tokens).repeat(sizes.problems)
    closes = (position + 1) % sizes.paragraph == 0
    consistency = torch.where(closes, (raw[:, 3] > 0).float(), torch.nan)
    targets = torch.stack(
        [raw[:, 0].sigmoid(), raw[:, 1].sigmoid(), (raw[:, 2] + 3).expm1().clamp(min=0), consistency], dim=1
    )
    trace = torch.arange(sizes.problems).repeat_interleave(tokens)
    return {
        "target_last": hidden.to(sizes.dtype),
        "target_aux": aux.to(sizes.dtype),
        "scalars": scalars,
        "targets": targets,
        "trace": trace,
        "position": position,
        "boundary": torch.where(closes, position // sizes.paragraph, -1),
        "split": torch.where(trace % 8 < 5, 0, trace % 8 - 4),
    }


def describe_shard(folder: Path) -> None:
    """Writes the shard's shard.json as far as readers look at it."""
    write_json(folder / "shard.json", {"sha256": {file.name: sha256_file(file) for file in folder.iterdir()}})


def make_dataset(folder: Path, sizes: Synthetic) -> dict[str, Tensor]:
    """Writes the data set folder and gives its rows in order."""
    rows = make_rows(sizes)
    parts = torch.arange(sizes.problems).tensor_split(sizes.shards)
    for index, problems in enumerate(parts):
        inside = torch.isin(rows["trace"], problems)
        shard = folder / "shards" / f"{index:05d}"
        write_features(shard, {name: column[inside] for name, column in rows.items()})
        describe_shard(shard)
    spec = FeatureSpec(
        sources=("target_last", "target_aux", "scalars"), hidden_size=sizes.hidden_size, aux_layers=sizes.aux_layers
    )
    dataset: dict[str, JSON] = {
        "format": 1,
        "target": target_json(sizes.hidden_size),
        "features": spec.to_json(),
        "feature_dtype": str(sizes.dtype).removeprefix("torch."),
        "splits": {split: int((rows["split"] == SPLITS.index(split)).sum()) for split in SPLITS},
        "sampling": {"temperature": 1.0},
        "think_end": [2],
        "num_problems": sizes.problems,
        "num_shards": sizes.shards,
        "sha256": "d" * 64,
    }
    write_json(folder / "dataset.json", dataset)
    return rows

"""Made-up traces with a latent moment at which the answer becomes known, and noisy signals of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ace_learn.artifacts import write_json
from ace_learn.evaluate.traces import TRACE_SCHEMA, Traces
from ace_learn.features import SPLITS, FeatureSpec, write_features
from ace_learn.heads.export import HeadCard, save_head
from ace_learn.heads.head import HeadConfig, SignalHead, natural
from ace_learn.models.identity import TargetIdentity
from ace_learn.thinking import ThinkMarkers
from tests.features.synthetic import describe_shard

THINK_START, THINK_END_LENGTH, ANSWER = 1, 1, 6


@dataclass(frozen=True, kw_only=True)
class World:
    """How the made-up reasoner behaves."""

    full_accuracy: float = 0.93
    early_guess: float = 0.08
    late_slip: float = 0.005
    noise: float = 0.8


def make_row(rng: np.random.Generator, problem: int, split: str, world: World) -> dict[str, object]:
    num = int(rng.integers(3, 12))
    boundary = np.cumsum(rng.integers(6, 18, num)) - 1
    known = int(rng.integers(0, num))
    gold, correct = 7, bool(rng.random() < world.full_accuracy)
    full = gold if correct else 8
    late = np.arange(num) >= known
    keeps = np.where(late, rng.random(num) > world.late_slip, rng.random(num) < world.early_guess)
    answers = [full if keep else 100 + i for i, keep in enumerate(keeps)]
    matches = [answer == full for answer in answers]
    where = np.flatnonzero(matches)
    wrong = np.flatnonzero(~np.array(matches))
    think_end = THINK_START + int(boundary[-1]) + 1 + int(rng.integers(0, 5))
    no_think = gold if rng.random() < 0.2 else 3
    return {
        "problem": problem,
        "family": "even" if problem % 2 == 0 else "odd",
        "split": split,
        "excluded": False,
        "gold": json.dumps(gold),
        "think_start": THINK_START,
        "think_end": think_end,
        "full_answer": json.dumps(full),
        "full_correct": correct,
        "full_tokens": think_end + THINK_END_LENGTH + ANSWER,
        "no_think_answer": json.dumps(no_think),
        "no_think_correct": no_think == gold,
        "no_think_tokens": ANSWER,
        "boundary": boundary.tolist(),
        "probe_answer": [json.dumps(answer) for answer in answers],
        "probe_matches": matches,
        "probe_correct": [answer == gold for answer in answers],
        "probe_tokens": (THINK_START + boundary + 1 + THINK_END_LENGTH + ANSWER).tolist(),
        "boundary_confidence": rng.uniform(0.5, 1.0, num).astype(np.float32).tolist(),
        "first": int(where[0]) if where.size else num,
        "stable": int(wrong[-1] + 1) if wrong.size else 0,
    }


def make_rows(n: int, *, seed: int = 0, split: str = "test", start: int = 0, world: World = World()):
    rng = np.random.default_rng([seed, start])
    return [make_row(rng, start + i, split, world) for i in range(n)]


def make_traces(n: int, *, seed: int = 0, split: str = "test", world: World = World()) -> Traces:
    return Traces.from_rows(make_rows(n, seed=seed, split=split, world=world), split=split)


def make_signals(traces: Traces, *, seed: int = 0, world: World = World()) -> np.ndarray:
    """Noisy signals [n, P, 4] in natural units, nan on padding."""
    rng = np.random.default_rng([seed, 99])
    shape = traces.boundary.shape
    end = traces.think_tokens_at[np.arange(traces.num_problems), traces.first][:, None]
    thought = traces.boundary + 1.0
    remaining = np.maximum(0.0, end - thought)
    progress = np.minimum(1.0, thought / np.maximum(1.0, end))
    logit = np.where(traces.matches_at[:, :-1], 3.0, -3.0) + world.noise * 2 * rng.normal(size=shape)
    columns = [
        np.clip(traces.boundary_confidence + 0.02 * rng.normal(size=shape), 0.01, 0.99),
        np.clip(progress + 0.1 * world.noise * rng.normal(size=shape), 0.01, 0.99),
        np.maximum(0.0, np.expm1(np.log1p(remaining) + world.noise * rng.normal(size=shape))),
        1 / (1 + np.exp(-logit)),
    ]
    signals = np.stack(columns, axis=-1).astype(np.float32)
    signals[~traces.is_boundary] = np.nan
    return signals


IDENTITY = TargetIdentity(
    name="synthetic",
    fingerprint="f" * 64,
    hidden_size=4,
    num_layers=2,
    vocab_size=32,
    markers=ThinkMarkers((1,), (2,)),
    tables_sha256="0" * 64,
)
SPEC = FeatureSpec(sources=("target_last",), hidden_size=4, aux_layers=())


def raw_of(signals: np.ndarray) -> np.ndarray:
    """Training-space values of signals, which a head with identity weights turns back into them."""
    clipped = np.clip(signals, 1e-6, 1 - 1e-6)
    raw = np.log(clipped) - np.log1p(-clipped)
    raw[..., 2] = np.log1p(signals[..., 2])
    return raw.astype(np.float32)


def write_dataset(folder: Path, sizes: dict[str, int], *, every_token: bool = False, world: World = World()) -> None:
    """A data set folder of one shard per split whose `target_last` features are the signals in training space."""
    start = 0
    for shard, (split, size) in enumerate(sizes.items()):
        rows = make_rows(size, split=split, start=start, world=world)
        start += size
        where = folder / "shards" / f"{shard:05d}"
        where.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=TRACE_SCHEMA), where / "traces.parquet")
        traces = Traces.from_rows(rows, split=split)
        raw = raw_of(make_signals(traces, world=world))
        write_features(where, token_rows(traces, raw) if every_token else boundary_rows(traces, raw))
        describe_shard(where)
    dataset = {
        "format": 1,
        "target": IDENTITY.to_json(),
        "features": SPEC.to_json(),
        "feature_dtype": "float32",
        "rows": "all" if every_token else "boundaries",
        "splits": dict(sizes),
        "sampling": {"temperature": 1.0},
        "think_end": [2],
        "num_problems": start,
        "num_shards": len(sizes),
        "sha256": "d" * 64,
    }
    write_json(folder / "dataset.json", dataset)


def boundary_rows(traces: Traces, raw: np.ndarray) -> dict[str, torch.Tensor]:
    trace, column = np.nonzero(traces.is_boundary)
    return feature_columns(traces, raw[trace, column], trace, traces.boundary[trace, column], column)


def token_rows(traces: Traces, raw: np.ndarray) -> dict[str, torch.Tensor]:
    """Every thought token up to the last boundary; a token carries the values of the boundary that it leads to."""
    trace, position, boundary, values = [], [], [], []
    for i in range(traces.num_problems):
        ends = traces.boundary[i, : traces.num_boundaries[i]]
        for t in range(int(ends[-1]) + 1):
            nxt = int(np.searchsorted(ends, t))
            trace.append(i)
            position.append(t)
            boundary.append(nxt if ends[nxt] == t else -1)
            values.append(raw[i, nxt])
    return feature_columns(traces, np.stack(values), np.array(trace), np.array(position), np.array(boundary))


def feature_columns(traces, values, trace, position, boundary) -> dict[str, torch.Tensor]:
    return {
        "target_last": torch.from_numpy(np.ascontiguousarray(values)),
        "targets": natural(torch.from_numpy(np.ascontiguousarray(values))),
        "trace": torch.from_numpy(traces.problem[trace]),
        "position": torch.from_numpy(np.asarray(position, dtype=np.int64)),
        "boundary": torch.from_numpy(np.asarray(boundary, dtype=np.int64)),
        "split": torch.full((len(trace),), SPLITS.index(traces.split)),
    }


def write_identity_head(folder: Path, identity: TargetIdentity = IDENTITY, *, scale: float = 1.0) -> None:
    """A linear head that hands its features through, scaled."""
    config = HeadConfig(arch="linear")
    head = SignalHead(config, SPEC.size)
    state = {name: torch.zeros_like(value) for name, value in head.state_dict().items()}
    state["std"] += 1
    state["layers.0.weight"] += scale * torch.eye(4)
    head.load_state_dict(state)
    folder.mkdir(parents=True)
    card = HeadCard(config=config, spec=SPEC, identity=identity, data_sha256="d" * 64, rows="boundaries", metrics=None)
    save_head(folder, head, card)

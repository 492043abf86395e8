"""Live runs: the engine on held-out problems, with exits and without, against what the replay said."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ace_learn.artifacts import JSON, read_fields
from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import build_engine
from ace_learn.engines.requests import Output, Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.metrics import LatencyModel, answer_times, json_of
from ace_learn.features import shard_folders
from ace_learn.labels.records import TraceRecord, read_records
from ace_learn.models.target import Target
from ace_learn.speculation.drafters import DrafterConfig

_LATENCY_PROBLEMS = 24


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """How the live run decodes."""

    problems: int = 200
    """Test problems run live."""
    batch_size: int = 50
    """Requests decoded together."""
    drafter: DrafterConfig = DrafterConfig(kind="ngram")
    """What drafts in the speculative part; `none` leaves that part out."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        if self.problems < 1 or self.batch_size < 1:
            raise ValueError(f"need problems >= 1 and batch_size >= 1, not {self.problems} and {self.batch_size}")


@dataclass(kw_only=True)
class _Arms:
    engines: dict[str, HFEngine]
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, requests: Sequence[Request]) -> None:
        outputs = self.engines[name].generate(requests)
        self.outputs.setdefault(name, []).extend(outputs)
        self.seconds[name] = self.seconds.get(name, 0.0) + max(output.seconds for output in outputs)


def load_records(dataset: Path, split: str) -> Iterator[TraceRecord]:
    """Labelled traces of a split that are not excluded, in problem order."""
    for shard in shard_folders(dataset):
        for record in read_records(shard / "traces.parquet"):
            if record.split == split and not record.excluded:
                yield record


def expected_tokens(record: TraceRecord, exit_index: int, think_end: Sequence[int]) -> tuple[int, ...]:
    """Output tokens of a run that exits at a boundary, as the probes have them."""
    if exit_index == len(record.boundary):
        return tuple(record.token_ids)
    kept = record.token_ids[: record.think_start + record.boundary[exit_index] + 1]
    answer = record.probe_token_ids[exit_index]
    assert answer is not None, "a split that is replayed is probed at every boundary"
    return (*kept, *think_end, *answer)


def live_run(
    target: Target, dataset: Path, head_folder: Path, exit_index: Sequence[int], config: LiveConfig
) -> tuple[dict[str, JSON], LatencyModel]:
    """Runs test problems live: full thinking and learned exits on the same problems, in one go, in random order.

    Args:
        target: The model.
        dataset: The data set whose test split was replayed.
        head_folder: Head with policy.
        exit_index: The replayed exit of each test problem, in the order of `load_records`.
        config: Sizes.

    Returns:
        The report's `live` entry, and the latency model measured at batch size 1.

    Raises:
        ValueError: The split has fewer problems, or the head belongs to another target.
    """
    records = list(load_records(dataset, "test"))
    if len(records) < config.problems:
        raise ValueError(
            f"the test split has {len(records)} problems, fewer than the {config.problems} of the live run"
        )
    settings = read_fields(dataset / "dataset.json")
    sampling = Sampling.from_json(settings.fields("sampling").data)
    shown = records[: config.problems]
    requests = [_request(r, settings.integer("max_new_tokens"), settings.integer("max_answer_tokens")) for r in shown]
    arms = _Arms(engines=_engines(target, head_folder, sampling, config))
    shuffled = random.Random(sampling.seed)
    for start in tqdm(range(0, len(requests), config.batch_size), desc="live", unit="batch"):
        names = list(arms.engines)
        shuffled.shuffle(names)
        for name in names:
            arms.run(name, requests[start : start + config.batch_size])
    latency = measure_latency(arms.engines["full"], arms.engines["learned"], requests[:_LATENCY_PROBLEMS])
    return _live_json(arms, shown, exit_index, target), latency


def _engines(target: Target, head_folder: Path, sampling: Sampling, config: LiveConfig) -> dict[str, HFEngine]:
    def engine(head: Path | None, drafter: DrafterConfig | None) -> HFEngine:
        return build_engine(target, head=head, sampling=sampling, batch_size=config.batch_size, drafter=drafter)

    engines = {"full": engine(None, None), "learned": engine(head_folder, None)}
    if config.drafter.kind != "none":
        engines[f"learned_{config.drafter.kind}"] = engine(head_folder, config.drafter)
    return engines


def _request(record: TraceRecord, max_new_tokens: int, max_answer_tokens: int) -> Request:
    return Request(
        key=record.problem,
        prompt_ids=tuple(record.prompt_ids),
        contract=Contract.from_spec(record.contract),
        max_new_tokens=max_new_tokens,
        max_answer_tokens=max_answer_tokens,
    )


def measure_latency(full: HFEngine, learned: HFEngine, requests: Sequence[Request]) -> LatencyModel:
    """Fits seconds = prefill + per_token x output tokens to runs at batch size 1, long ones and short ones."""
    tokens, seconds = [], []
    for engine in (full, learned):
        for request in requests:
            engine_outputs = engine.generate([request])
            tokens.append(len(engine_outputs[0].token_ids))
            seconds.append(engine_outputs[0].seconds)
    return LatencyModel.fit(tokens, seconds)


def _live_json(
    arms: _Arms, records: Sequence[TraceRecord], exit_index: Sequence[int], target: Target
) -> dict[str, JSON]:
    learned = arms.outputs["learned"]
    expected = [expected_tokens(record, exit_index[i], target.markers.end) for i, record in enumerate(records)]
    differing = [r.problem for r, o, want in zip(records, learned, expected, strict=True) if o.token_ids != want]
    full = [r.problem for r, o in zip(records, arms.outputs["full"], strict=True) if list(o.token_ids) != r.token_ids]
    natural = [len(record.boundary) for record in records]
    methods: dict[str, JSON] = {
        name: _arm_json(arms, name, records, natural if name == "full" else exit_index, target) for name in arms.outputs
    }
    return {
        "n": len(records),
        "equals_replay": not differing and not full,
        "identical_learned": len(records) - len(differing),
        "identical_full": len(records) - len(full),
        "first_differing": [*differing[:5], *full[:5]],
        "exits": sum(output.exit is not None for output in learned),
        "seconds_ratio_full_over_learned": arms.seconds["full"] / arms.seconds["learned"],
        "methods": methods,
    }


def _arm_json(
    arms: _Arms, name: str, records: Sequence[TraceRecord], exit_index: Sequence[int], target: Target
) -> dict[str, JSON]:
    outputs, seconds = arms.outputs[name], arms.seconds[name]
    correct = [
        answered_correctly(record, output, exit_index[i], target.markers.end)
        for i, (record, output) in enumerate(zip(records, outputs, strict=True))
    ]
    times = answer_times(
        np.array([output.seconds for output in outputs]),
        np.array([output.answer is not None for output in outputs]),
        np.array(correct),
        elapsed_s=seconds,
    )
    steps = sum(output.stats.verify_steps for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "accuracy": float(np.mean(correct)),
        "tokens_mean": tokens / len(outputs),
        "seconds": seconds,
        **json_of(times._asdict()),
        "tokens_per_verify_step": tokens / steps,
        "drafted": sum(output.stats.drafted for output in outputs),
        "accepted": sum(output.stats.accepted for output in outputs),
    }


def answered_correctly(record: TraceRecord, output: Output, exit_index: int, think_end: Sequence[int]) -> bool:
    """Whether a live answer is right.

    The task's own verifier has judged the tokens that the replay expects. A record cannot take it along, so that other
    tokens are judged by equality with gold.
    """
    if output.token_ids == expected_tokens(record, exit_index, think_end):
        return record.full_correct if exit_index == len(record.boundary) else record.probe_correct[exit_index] is True
    return record.gold is not None and Contract.from_spec(record.contract).equal(output.answer, json.loads(record.gold))

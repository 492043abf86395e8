"""Builds a data set: problems -> traces -> probes -> labels and features, in resumable shards."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from tqdm import tqdm

from ace_learn.artifacts import (
    JSON,
    ProvenanceRecorder,
    atomic_folder,
    clean_stale,
    read_fields,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
    writer_lock,
)
from ace_learn.engines.capture import CaptureRows
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.sampling import Sampling
from ace_learn.features import (
    DEFAULT_SOURCES,
    SOURCES,
    SPLITS,
    FeatureSpec,
    FeatureWriter,
    Source,
    needs_drafter,
    shard_folders,
)
from ace_learn.labels.acceptance import kept_estimator
from ace_learn.labels.claim import claim, refuse_other_recipe, release
from ace_learn.labels.probing import Labelled, Problem, as_problem, label_batch
from ace_learn.labels.records import TraceRecord, write_records
from ace_learn.labels.strategy import ProbingConfig
from ace_learn.labels.summary import write_summary
from ace_learn.labels.targets import Minimal
from ace_learn.models.target import Target, TargetConfig, load_target
from ace_learn.speculation.adaptive import AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter, DrafterConfig
from ace_learn.tasks import TaskConfig, build_task
from ace_learn.tasks.base import check_count

_ENOUGH_TRACES = 32
"""So many traces without anything to learn from end a build early."""


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What is captured at each row."""

    sources: tuple[Source, ...] = DEFAULT_SOURCES
    """Kinds of features."""
    aux_layers: tuple[int, ...] | None = None
    """Decoder layers behind `target_aux`; None: the three that EAGLE-3 taps."""
    drafter: DrafterConfig = DrafterConfig()
    """Behind `draft` and `acceptance`: a drafter of kind eagle3 or mtp. Its states are read `draft_tokens` + 1
    positions late, so that as many tokens can be drafted when a head reads them; the traces themselves are decoded
    without speculation."""
    rows: CaptureRows = "boundaries"
    """`boundaries`, or `all` tokens of the think span (needed to smooth signals over tokens)."""

    def __post_init__(self) -> None:
        """Refuses layers that nothing would read."""
        if self.aux_layers is not None and "target_aux" not in self.sources:
            raise ValueError("aux_layers are read by the source target_aux alone; add it to sources, or leave them out")
        if needs_drafter(self.sources) != (self.drafter.kind != "none"):
            raise ValueError(
                "the sources draft and acceptance and features.drafter go together; set both, or leave both out"
            )


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """A recipe of `python -m ace_learn.build`."""

    target: TargetConfig
    """The model that thinks."""
    output: Path
    """Folder of the data set; a killed run continues there."""
    splits: dict[str, int]
    """Problems per split: train, validation, calibration, test."""
    task: TaskConfig = TaskConfig()
    """Where the problems come from."""
    sampling: Sampling = Sampling()
    """How traces and probes are sampled; a certificate holds for this sampling alone."""
    features: FeatureConfig = FeatureConfig()
    """What heads can be trained on."""
    probing: ProbingConfig = ProbingConfig()
    """Which boundaries of the train split are probed, and how often."""
    minimal: Minimal = "first"
    """Which boundary is the minimal one: the `first` whose answer matches, or `stable` from there on."""
    max_new_tokens: int = 4096
    """Cap on a trace; one that is cut before its think end is excluded and counted."""
    max_answer_tokens: int = 256
    """Cap on the answer, of traces and of probes."""
    batch_size: int = 64
    """Traces decoded together, and probes decoded together."""
    shard_size: int = 256
    """Problems per shard, the unit of resuming."""
    plain: bool = False
    """Prompt a model that has no chat template with the bare text."""
    seed: int = 0
    """Which problems, and their order."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        unknown = set(self.splits) - set(SPLITS)
        if unknown or sum(self.splits.values()) < 1 or min(self.splits.values()) < 0:
            raise ValueError(f"splits must give counts for some of {', '.join(SPLITS)}, not {self.splits}")
        check_count(sum(self.splits.values()))
        for name in ("max_new_tokens", "max_answer_tokens", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, not {self.seed}")
        if "acceptance" in self.features.sources:
            self._check_acceptance()
        self._check_probing()

    def _check_acceptance(self) -> None:
        if self.sampling.temperature == 0.0 or self.splits.get("train", 0) == 0:
            raise ValueError(
                "the source acceptance fits an estimator on drafts for train problems, drawn at a temperature above 0; "
                "set sampling.temperature and splits.train, or leave acceptance out"
            )

    def _check_probing(self) -> None:
        probing = self.probing
        if (probing.strategy != "all" or probing.samples > 1) and self.splits.get("train", 0) == 0:
            raise ValueError("probing.strategy and probing.samples touch the train split alone, and splits has none")
        if probing.samples > 1 and self.sampling.temperature == 0.0:
            raise ValueError("at temperature 0 all probing.samples are alike; set probing.samples 1, or a temperature")
        if probing.strategy == "first" and self.minimal == "stable":
            raise ValueError(
                "minimal `stable` needs the boundaries behind the first match, and probing.strategy `first` leaves "
                "them out; choose minimal `first`, or another strategy"
            )


@dataclass(kw_only=True)
class _Shard:
    """Labels of a shard, and what they cost in tokens run through the target; the features are on the disk."""

    records: list[TraceRecord] = field(default_factory=list)
    trace_tokens: int = 0
    probe_tokens: int = 0
    naive_probe_tokens: int = 0

    def add(self, labelled: Labelled) -> None:
        self.records.extend(labelled.records)
        self.trace_tokens += labelled.trace_tokens
        self.probe_tokens += labelled.probe_tokens
        self.naive_probe_tokens += labelled.naive_probe_tokens

    def to_json(self) -> dict[str, JSON]:
        return {
            "problems": len(self.records),
            "excluded": sum(record.excluded for record in self.records),
            "usable": sum(not record.excluded for record in self.records),
            "answered": sum(map(_answered, self.records)),
            "boundaries": sum(len(record.boundary) for record in self.records),
            "trace_tokens": self.trace_tokens,
            "probe_tokens": self.probe_tokens,
            "naive_probe_tokens": self.naive_probe_tokens,
        }


def build_dataset(config: BuildConfig) -> Path:
    """Builds or continues a data set; returns its folder.

    dataset.json comes last: a folder with it, of the same recipe and with every shard, is complete. A shard that is
    missing is made anew.

    Raises:
        ValueError: The recipe cannot be built (model, task, contract), the folder holds another data set, the model or
            the problems have changed since it was begun, or another process is writing it.
        OSError: The disk is full; finished shards stay.
    """
    output = config.output
    output.mkdir(parents=True, exist_ok=True)
    with writer_lock(output), ProvenanceRecorder() as provenance:
        refuse_other_recipe(config, output)
        target = load_target(config.target)
        drafter = _drafter(config, target)
        spec = _spec(config, target, drafter)
        problems = _problems(config, target)
        claim(config, output, target.identity, problems)
        groups = [problems[i : i + config.shard_size] for i in range(0, len(problems), config.shard_size)]
        folders = [output / "shards" / f"{number:05d}" for number in range(len(groups))]
        missing = [number for number, folder in enumerate(folders) if not (folder / "shard.json").is_file()]
        if not missing and (output / "dataset.json").exists():
            print(f"{output} is complete; delete it to build it again")
            return output
        (output / "dataset.json").unlink(missing_ok=True)
        (output / "shards").mkdir(exist_ok=True)
        clean_stale(output / "shards")
        engine = _engine(config, target, drafter, spec, problems)
        with tqdm(total=len(problems), unit="problem", desc="build", smoothing=0.05) as bar:
            bar.update(len(problems) - sum(len(groups[number]) for number in missing))
            for number in missing:
                _write_shard(folders[number], engine, groups[number], config, bar, last=number == missing[-1])
        write_summary(output, probing=config.probing, minimal=config.minimal)
        provenance.write(output)
        _describe(config, target, spec, folders)
    return output


def _problems(config: BuildConfig, target: Target) -> list[Problem]:
    """Every problem of the data set, with its split; the order is shuffled so that each split is alike."""
    count = sum(config.splits.values())
    labels = np.repeat(
        [name for name in SPLITS if name in config.splits], [config.splits[n] for n in SPLITS if n in config.splits]
    )
    np.random.default_rng(config.seed).shuffle(labels)
    return [
        as_problem(
            index,
            str(labels[index]),
            example,
            target,
            max_new_tokens=config.max_new_tokens,
            max_answer_tokens=config.max_answer_tokens,
            plain=config.plain,
        )
        for index, example in enumerate(build_task(config.task).examples(count, config.seed))
    ]


def _drafter(config: BuildConfig, target: Target) -> Drafter | None:
    """What gives the features `draft`; nothing is drafted with it, so that traces are those of other sources."""
    drafter = config.features.drafter
    return load_drafter(
        drafter, target, config.sampling, states_delay=0 if drafter.kind == "none" else drafter.draft_tokens + 1
    )


def _engine(
    config: BuildConfig, target: Target, drafter: Drafter | None, spec: FeatureSpec, problems: Sequence[Problem]
) -> HFEngine:
    estimator = None
    if "acceptance" in spec.sources:
        assert drafter is not None, "FeatureConfig sees to it"
        asked = [problem.request for problem in problems if problem.split == "train"]
        estimator = kept_estimator(
            config.output, target, drafter, asked, sampling=config.sampling, length=config.features.drafter.draft_tokens
        )
    return HFEngine(
        target,
        sampling=config.sampling,
        drafter=drafter,
        verifier=None if estimator is None else AdaptiveVerifier(estimator=estimator, costs=None),
        aux_layers=spec.aux_layers,
        candidates="candidates" in spec.sources,
        acceptance_columns=estimator is not None,
        batch_size=config.batch_size,
    )


def _spec(config: BuildConfig, target: Target, drafter: Drafter | None) -> FeatureSpec:
    features = config.features
    layers = target.default_aux_layers() if features.aux_layers is None else features.aux_layers
    outside = [layer for layer in layers if not 0 <= layer < len(target.layers)]
    if outside:
        raise ValueError(f"aux_layers {outside} are outside the model's layers 0..{len(target.layers) - 1}")
    return FeatureSpec(
        sources=features.sources,
        hidden_size=target.identity.hidden_size,
        aux_layers=layers if "target_aux" in features.sources else (),
        draft=None if drafter is None else drafter.states,
    )


def _write_shard(
    folder: Path, engine: HFEngine, problems: Sequence[Problem], config: BuildConfig, bar: tqdm[NoReturn], *, last: bool
) -> None:
    """Labels a shard's problems; feature rows go to the disk batch by batch, since a shard's may not fit in memory."""
    if folder.is_dir():
        shutil.rmtree(folder)  # without its shard.json, so that it counts as missing
    shard = _Shard()
    with atomic_folder(folder) as temporary:
        with FeatureWriter(temporary) as features:
            for start in range(0, len(problems), config.batch_size):
                batch = problems[start : start + config.batch_size]
                labelled = label_batch(
                    engine, batch, rows=config.features.rows, minimal=config.minimal, probing=config.probing
                )
                features.append(_columns(labelled, batch, config.features))
                shard.add(labelled)
                bar.update(len(batch))
            useless = _useless(folder.parent, shard.records, config, last=last)
            if useless is not None:
                release(config.output)
                raise ValueError(useless)
        write_records(temporary / "traces.parquet", shard.records)
        files = {name: sha256_file(temporary / name) for name in ("traces.parquet", "features.safetensors")}
        write_json(temporary / "shard.json", {**shard.to_json(), "sha256": dict(files)})


def _columns(labelled: Labelled, batch: Sequence[Problem], features: FeatureConfig) -> dict[str, torch.Tensor]:
    """The columns of a batch that are kept."""
    split = torch.tensor([SPLITS.index(problem.split) for problem in batch])
    kept = {name: rows for name, rows in labelled.rows.items() if name in features.sources or name not in SOURCES}
    return kept | {"split": split[labelled.rows["trace"] - batch[0].number]}


def _useless(shards: Path, records: Sequence[TraceRecord], config: BuildConfig, *, last: bool) -> str | None:
    """Why it makes no sense to go on: no trace so far can be learned from, and there are many or no more to come."""
    done = [shard / "shard.json" for shard in shard_folders(shards.parent)]
    counts = [read_fields(path) for path in done if path.is_file()]
    traces, usable, answered = (
        sum(count.integer(name) for count in counts) + value
        for name, value in (
            ("problems", len(records)),
            ("usable", sum(not record.excluded for record in records)),
            ("answered", sum(_answered(record) for record in records)),
        )
    )
    if usable == 0 and (last or traces >= _ENOUGH_TRACES):
        return (
            f"none of {traces} traces began and ended its thinking within {config.max_new_tokens} tokens; raise "
            "--max_new_tokens, or check the think markers (--target.think) and the chat template"
        )
    if answered == 0 and (last or usable >= _ENOUGH_TRACES):
        return (
            f"the contract {records[0].contract} never committed an answer in {usable} traces; check that the "
            "prompt asks for that form, choose another contract, or raise --max_answer_tokens"
        )
    return None


def _answered(record: TraceRecord) -> bool:
    return not record.excluded and record.full_answer is not None


def _describe(config: BuildConfig, target: Target, spec: FeatureSpec, folders: Sequence[Path]) -> None:
    """Writes dataset.json, which makes the data set complete."""
    shards: list[JSON] = [read_json(folder / "shard.json") for folder in folders]
    sampling: dict[str, JSON] = asdict(config.sampling)
    dtype = str(target.output_layer.weight.dtype).removeprefix("torch.")
    write_json(
        config.output / "dataset.json",
        {
            "format": 1,
            "target": target.identity.to_json(),
            "features": spec.to_json(),
            "feature_dtype": dtype,
            "rows": config.features.rows,
            "splits": dict(config.splits),
            "sampling": sampling,
            "max_new_tokens": config.max_new_tokens,
            "max_answer_tokens": config.max_answer_tokens,
            "think_end": list(target.markers.end),
            "num_problems": sum(config.splits.values()),
            "num_shards": len(folders),
            "sha256": sha256_json(shards),
        },
    )

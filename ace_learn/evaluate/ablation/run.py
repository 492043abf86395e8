"""The ablation as a command: build, train every head, settle every variant, compare, report."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ace_learn.artifacts import LOCK_NAMES, ProvenanceRecorder, dump_config, write_json, write_text, writer_lock
from ace_learn.evaluate.ablation.config import AblateConfig
from ace_learn.evaluate.ablation.outcomes import Outcome, SignalSource, settle
from ace_learn.evaluate.ablation.report import Ablation, ReferenceData, Texts, report_json, table_markdown
from ace_learn.evaluate.ablation.table import measure
from ace_learn.evaluate.ablation.variants import REFERENCE, Plan, check_data, plan_variants
from ace_learn.evaluate.baselines import BASELINES
from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.compare import METHODS, Curve, Splits, Tuned, baseline_results, tune_baseline
from ace_learn.evaluate.examples import choose
from ace_learn.evaluate.live import load_records
from ace_learn.evaluate.replay import Replayed, replay
from ace_learn.heads.report import TrainReport
from ace_learn.heads.train import train_head
from ace_learn.labels.build import build_dataset
from ace_learn.models.target import load_target

_MARK = "ablation.json"
"""What makes a folder an ablation's."""

_CURVE_POINTS = 60


def run_ablation(config: AblateConfig) -> Path:
    """Answer the questions of a recipe; returns the folder with the reports.

    OUTPUT gets heads/NAME, variants/*.json, report.json, table.md, report.html, pareto.png, config.yaml and
    provenance.json. Heads and variants that are there already are kept, so that a killed run continues and a recipe
    that has grown computes only what is new.

    Raises:
        ValueError: the recipe asks for what its data set or a policy cannot give, the folder holds something else, or a
            stage was refused.
        OSError: the disk is full or a path cannot be read or written.
    """
    plan = plan_variants(config)
    check_data(config, plan)
    trainings = {name: config.train_config(name) for name in config.heads}
    torch.set_num_threads(config.threads)
    with writer_lock(config.output), ProvenanceRecorder() as provenance:
        _claim(config.output)
        if config.build is not None:
            build_dataset(config.build)
        bar = tqdm(trainings.items(), desc="heads", unit="head")
        training = {name: train_head(training) for name, training in bar}
        source = SignalSource.open(config.data, {name: config.head_folder(name) for name in config.heads})
        outcomes = _settle_all(config, plan, source)
        ablation = _compare(config, plan, source, outcomes, training)
        _write(ablation, source)
        provenance.write(config.output)
    print(f"{config.output / 'report.html'}: {len(plan.variants)} variants, {len(config.heads)} heads")
    return config.output


def _claim(output: Path) -> None:
    """Leaves a folder alone that holds anything but an ablation."""
    entries = [entry.name for entry in output.iterdir() if entry.name not in LOCK_NAMES]
    if entries and _MARK not in entries:
        raise ValueError(f"{output} holds something else than an ablation (it has no {_MARK}); name another --output")
    write_json(output / _MARK, {"format": 1})


def _settle_all(config: AblateConfig, plan: Plan, source: SignalSource) -> dict[str, Outcome]:
    """Every variant's outcome; variants of one head and smoothing share their signals."""
    folder = config.output / "variants"
    bar = tqdm(plan.variants.items(), desc="variants", unit="variant")
    return {name: settle(variant, source, config.risk, folder) for name, variant in bar}


def _compare(
    config: AblateConfig,
    plan: Plan,
    source: SignalSource,
    outcomes: Mapping[str, Outcome],
    training: Mapping[str, TrainReport],
) -> Ablation:
    splits, test = source.splits, source.splits.test
    tuned = {name: tune_baseline(cls(), splits, risk=config.risk) for name, cls in BASELINES.items() if cls.tuned}
    baselines = [name for name in METHODS if name in BASELINES]
    results = {name: baseline_results(BASELINES[name](), tuned.get(name), test) for name in baselines}
    results |= {name: replay(test, outcome.exit_index) for name, outcome in outcomes.items()}
    compared = [name for name in results if name in tuned or (name in outcomes and name not in plan.fixed)]
    compared.remove(REFERENCE)
    bootstrap = Bootstrap(replicates=config.replicates, seed=config.seed)
    return Ablation(
        config=config,
        plan=plan,
        splits=splits,
        outcomes=outcomes,
        tuned=tuned,
        results=results,
        measured=measure(results, test, reference=REFERENCE, compared=compared, bootstrap=bootstrap),
        training=training,
        curves=_baseline_curves(splits, tuned),
        examples=choose(test, outcomes[REFERENCE].exit_index),
        data_sha256=source.opened(config.reference.head).scope.data_sha256,
    )


def _baseline_curves(splits: Splits, tuned: Mapping[str, Tuned]) -> dict[str, Curve]:
    """Accuracy over tokens along the thresholds of the tuned baselines, from full thinking on."""
    curves = {}
    for name in tuned:
        baseline = BASELINES[name]()
        along = baseline.replay(splits.test, np.append(np.inf, baseline.grid(splits.test, _CURVE_POINTS)))
        curves[name] = curve_of(along)
    return curves


def curve_of(replayed: Replayed) -> Curve:
    """Mean output tokens and accuracy of each grid point."""
    return Curve(replayed.tokens.mean(axis=-1), replayed.correct.mean(axis=-1))


def _write(ablation: Ablation, source: SignalSource) -> None:
    """Writes the reports; `report.json` comes last, so that who finds it finds the others, all of one recipe."""
    from ace_learn.evaluate.ablation.page import ablation_page, pareto
    from ace_learn.evaluate.page import write_page
    from ace_learn.evaluate.plots import plot_dots

    output, n = ablation.config.output, ablation.splits.test.num_problems
    (output / "report.json").unlink(missing_ok=True)
    write_text(output / "config.yaml", dump_config(ablation.config))
    plot_dots(
        output / "pareto.png", *pareto(ablation), title=f"Accuracy over tokens, {n} held-out problems, 95% intervals"
    )
    write_page(output / "report.html", ablation_page(ablation, _reference_data(ablation, source)))
    write_text(output / "table.md", table_markdown(ablation))
    write_json(output / "report.json", report_json(ablation))


def _reference_data(ablation: Ablation, source: SignalSource) -> ReferenceData:
    """The reference's signals on the test split, and the texts where the model that wrote them is known."""
    reference = ablation.plan.variants[REFERENCE]
    return ReferenceData(
        signals=source.smoothed(reference.head, 1.0, "boundaries").test,
        smoothed=source.smoothed(reference.head, *reference.smoothing).test,
        texts=_texts(ablation.config) if ablation.examples else None,
    )


def _texts(config: AblateConfig) -> Texts | None:
    if config.model is None:
        return None
    records = sorted(load_records(config.data, "test"), key=lambda record: record.problem)
    return Texts(tuple(records), load_target(config.model).decode)

"""The ablation as a user types it: help, refusals, and the recipe of the repository in miniature."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from ace_learn.cli import ablate
from ace_learn.cli.common import build_parser, parse_config
from ace_learn.evaluate.ablation.config import AblateConfig, FixedPolicy, Smoothing
from ace_learn.evaluate.ablation.run import run_ablation
from ace_learn.evaluate.ablation.variants import check_data, plan_variants
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureStore
from ace_learn.labels.strategy import ProbingConfig

RECIPE = Path(__file__).parents[2] / "experiments" / "signals.yaml"


def read_recipe(path=RECIPE):
    return parse_config(build_parser(AblateConfig, description=""), AblateConfig, [str(path)])


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        ablate.main(["--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Compare heads and exit policies at the same certified risk" in shown
    for text in ("Heads to train, by name.", "The questions, by name.", "Policies with given thresholds, by name."):
        assert text in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"g": {"title": "?", "heads": ["nobody"]}}}, "there is no head 'nobody'"),
        ({"groups": {"g": {"title": "?", "signals": [["hope"]]}}}, "name one or more of the signals"),
        ({"groups": {"g": {"title": "?", "patienc": [1]}}}, "patienc"),
        ({"dataset": "somewhere"}, "give either build"),
        ({"heads": {"reference": {"sources": ["target_first"]}}, "groups": {}, "fixed": {}}, "target_first"),
    ],
)
def test_bad_recipes_end_in_one_line(tmp_path, capsys, change, message):
    values = yaml.safe_load(RECIPE.read_text()) | change | {"output": str(tmp_path / "out")}
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit) as stopped:
        ablate.main([str(path)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_stable_targets_need_the_probes_behind_the_first_match():
    config = read_recipe()
    build = replace(config.build, probing=ProbingConfig(strategy="first"))
    with pytest.raises(ValueError, match="the head 'stable' needs the stable boundary"):
        check_data(replace(config, build=build), plan_variants(config))


def test_the_recipe_asks_what_it_promises():
    config = read_recipe()
    plan = plan_variants(config)
    check_data(config, plan)
    assert len({plan.variants[name].policy.signals for name in plan.groups["signals"]}) == 15
    assert config.fixed["specexit"].policy() == ExitPolicy.specexit()
    smoothing = {plan.variants[name].smoothing[1] for name in plan.groups["smoothing"]}
    assert smoothing == {"boundaries", "tokens"}
    assert {head.minimal for head in config.heads.values()} >= {"built", "stable"}
    assert {head.weighting.kind for head in config.heads.values()} == {"fixed", "gradient"}
    assert {head.head.arch for head in config.heads.values()} == {"linear", "mlp", "ensemble"}


@pytest.mark.slow
def test_the_recipe_in_miniature(tmp_path):
    config = read_recipe()
    build = replace(
        config.build,
        output=tmp_path / "dataset",
        splits={"train": 60, "validation": 40, "calibration": 60, "test": 60},
        batch_size=110,
        shard_size=110,
    )
    groups = {name: config.groups[name] for name in ("signals", "smoothing", "minimal")}
    heads = {name: config.heads[name] for name in ("reference", "all_rows", "stable")}
    config = replace(
        config,
        output=tmp_path / "out",
        build=build,
        heads=heads,
        groups=groups,
        fixed={"specexit": FixedPolicy(head="all_rows", thresholds={"confidence": 0.8}, smoothing=Smoothing(ewma=0.1))},
        training=replace(config.training, max_epochs=2),
        risk=replace(config.risk, alpha=0.2),
        replicates=100,
    )
    run_ablation(config)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plan = plan_variants(config)
    assert set(plan.variants) < set(report["methods"])
    assert set(report["methods"]["reference"]["families"]) == {"chain", "legs", "shop"}
    assert report["methods"]["oracle"]["overall"]["captured_savings"] == 1.0
    page = (tmp_path / "out" / "report.html").read_text()
    for problem in report["examples"]["problems"]:
        assert f"Problem {problem} (" in page

    built = FeatureStore(build.output)
    rows = torch.arange(built.num_rows)
    again = FeatureStore(build.output, minimal="first").targets(rows)
    torch.testing.assert_close(again, built.targets(rows), rtol=0, atol=0, equal_nan=True)

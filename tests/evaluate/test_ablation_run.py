import json
import re
from dataclasses import replace

import pytest

from ace_learn.evaluate.ablation import outcomes as outcomes_module
from ace_learn.evaluate.ablation.config import FixedPolicy, GroupConfig, HeadVariant, Smoothing, TrainingConfig
from ace_learn.evaluate.ablation.run import run_ablation
from ace_learn.evaluate.learned import Risk
from ace_learn.heads.config import TrainerConfig
from ace_learn.heads.head import HeadConfig
from ace_learn.heads.weighting import WeightingConfig
from tests.evaluate.ablating import recipe
from tests.evaluate.synthetic import World, write_dataset

SIZES = {"train": 60, "validation": 60, "calibration": 200, "test": 80}
LINEAR = HeadVariant(head=HeadConfig(arch="linear"), sources=("target_last",))
FIGURES = [
    "n", "accuracy", "accuracy_interval", "think_tokens_mean", "tokens_mean", "captured_savings",
    "captured_savings_interval", "lost_correct", "lost_correct_ucb95", "mismatch", "savings_difference",
    "accuracy_difference", "adjusted_p",
]  # fmt: skip


def make_config(folder, **options):
    return recipe(
        **{
            "output": folder / "out",
            "dataset": folder / "dataset",
            "heads": {"reference": LINEAR, "seed_1": replace(LINEAR, seed=1)},
            "training": TrainingConfig(max_epochs=3, trainer=TrainerConfig(accelerator="cpu", progress_bar=False)),
            "groups": {
                "signals": GroupConfig(title="Which signals?", signals=(("consistency",), ("confidence",))),
                "heads": GroupConfig(title="Which head?", heads=("reference", "seed_1")),
                "smoothing": GroupConfig(title="Which smoothing?", smoothing=(Smoothing(ewma=0.5, over="tokens"),)),
            },
            "fixed": {"never": FixedPolicy(thresholds={"consistency": 1.0})},
            "risk": Risk(alpha=0.1),
            "replicates": 100,
        }
        | options
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    write_dataset(folder / "dataset", SIZES, every_token=True, world=World(noise=0.4))
    config = make_config(folder)
    run_ablation(config)
    return config


def test_report_json_is_as_documented(finished):
    report = json.loads((finished.output / "report.json").read_text())
    assert list(report) == [
        "format", "reference", "held_fixed", "data", "risk", "bootstrap", "comparisons", "groups", "methods", "heads",
        "examples",
    ]  # fmt: skip
    assert report["reference"] == "reference"
    assert report["data"]["splits"]["test"] == {
        "n": 80, "excluded": 0, "full_accuracy": report["methods"]["full"]["overall"]["accuracy"],
        "families": {"even": 40, "odd": 40},
    }  # fmt: skip
    assert report["groups"]["signals"] == {
        "title": "Which signals?", "variants": ["signals consistency", "signals confidence"],
    }  # fmt: skip
    assert list(report["methods"]) == [
        "full", "no_think", "budget", "confidence", "oracle", "reference", "signals consistency", "signals confidence",
        "head seed_1", "ewma 0.5 over tokens", "never (constants)",
    ]  # fmt: skip
    assert report["comparisons"]["count"] == 6  # four variants and the two tuned baselines
    for name, method in report["methods"].items():
        assert list(method["overall"]) == FIGURES
        assert list(method["families"]) == ["even", "odd"]
        kinds = {"reference": "learned", "full": "baseline", "never (constants)": "constants"}
        assert method["kind"] == kinds.get(name, method["kind"])
    learned = report["methods"]["reference"]
    assert learned["certificate"]["alpha"] == 0.1
    assert learned["certificate"]["p_value"] <= 0.05
    assert 1 <= learned["certificate"]["certified"] <= learned["certificate"]["candidates"] <= 60
    assert learned["rule"]["predicate"] == "score"
    assert learned["overall"]["captured_savings"] > 0.3
    assert learned["overall"]["savings_difference"] == {
        "estimate": 0.0, "interval": [0.0, 0.0], "excludes_zero": False,
    }  # fmt: skip
    assert learned["overall"]["adjusted_p"] is None
    assert 0 < report["methods"]["signals confidence"]["overall"]["adjusted_p"] <= 1
    constants = report["methods"]["never (constants)"]
    assert constants["certificate"] is None
    assert constants["overall"]["captured_savings"] == 0.0
    assert len(report["heads"]["seed_1"]["history"]) == 3
    assert report["heads"]["seed_1"]["config"]["seed"] == 1


def test_the_table_names_every_method_once_per_section(finished):
    table = (finished.output / "table.md").read_text()
    report = json.loads((finished.output / "report.json").read_text())
    by_family = table.split("## Captured savings by family")[1]
    cells = [line.split("|")[1].strip() for line in by_family.splitlines() if line.startswith("| ")]
    assert [cell.removesuffix(" (nothing certifies)") for cell in cells[2:]] == list(report["methods"])
    assert table.count("\n## ") == 5
    savings = report["methods"]["head seed_1"]["overall"]["captured_savings"]
    assert f"| head seed_1 | {savings:.1%} [" in table


def test_the_page_stands_alone(finished):
    page = (finished.output / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "it does not cover the choice of the best among them" in page
    for title in ("Which signals?", "Which head?", "Which smoothing?", "Methods"):
        assert title in page
    assert "Reliability of the consistency signal" in page
    assert (finished.output / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_keeps_what_is_finished(finished, monkeypatch):
    before = json.loads((finished.output / "report.json").read_text())
    (finished.output / "report.json").unlink()
    kept = sorted((finished.output / "variants").iterdir())
    assert len(kept) == 6
    kept[2].unlink()
    settled = []
    monkeypatch.setattr("ace_learn.heads.train.fit_head", lambda *_: pytest.fail("a head was trained again"))
    monkeypatch.setattr(outcomes_module, "decide", noting(settled, outcomes_module.decide))
    run_ablation(finished)
    assert len(settled) == 1
    assert json.loads((finished.output / "report.json").read_text()) == before


def test_a_recipe_that_has_grown_computes_only_what_is_new(finished, monkeypatch):
    settled = []
    monkeypatch.setattr("ace_learn.heads.train.fit_head", lambda *_: pytest.fail("a head was trained again"))
    monkeypatch.setattr(outcomes_module, "decide", noting(settled, outcomes_module.decide))
    groups = finished.groups | {"patience": GroupConfig(title="Patience?", patience=(1, 2))}
    run_ablation(replace(finished, groups=groups))
    assert [variant.name for variant in settled] == ["patience 2"]


def test_other_risks_are_other_variants(finished, monkeypatch):
    settled = []
    monkeypatch.setattr(outcomes_module, "decide", noting(settled, outcomes_module.decide))
    run_ablation(replace(finished, risk=Risk(alpha=0.2), groups={}, fixed={}))
    assert [variant.name for variant in settled] == ["reference"]


def test_a_recipe_that_is_refused_leaves_the_reports_and_their_recipe(finished):
    before = {name: (finished.output / name).read_bytes() for name in ("config.yaml", "report.json", "report.html")}
    other = finished.heads | {"reference": replace(LINEAR, seed=7)}
    with pytest.raises(ValueError, match="belongs to another run"):
        run_ablation(replace(finished, heads=other))
    assert {name: (finished.output / name).read_bytes() for name in before} == before


def test_a_run_that_is_killed_while_it_reports_leaves_no_old_report(finished, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("ace_learn.evaluate.page.write_page", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_ablation(finished)
    assert not (finished.output / "report.json").exists()
    run_ablation(finished)
    assert (finished.output / "report.json").exists()


def interrupted(*_):
    raise KeyboardInterrupt


def noting(settled, decide):
    def noted(variant, *args, **options):
        settled.append(variant)
        return decide(variant, *args, **options)

    return noted


def test_a_foreign_folder_is_left_alone(finished, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="something else than an ablation"):
        run_ablation(replace(finished, output=tmp_path))
    assert {entry.name for entry in tmp_path.iterdir()} <= {"thesis.tex", ".writer.lock"}


BAD = [
    ({"heads": ("reference", "other"), "fixed": {"f": FixedPolicy(head="unknown", thresholds={"progress": 0.5})}},
     "no head 'unknown'; the recipe's heads are reference, other"),
    ({"groups": {"g": GroupConfig(title="?", heads=("linear",))}}, "no head 'linear'"),
    ({"heads": ("a/b",)}, "cannot name a head's folder"),
    ({"dataset": None}, "either build"),
    ({"replicates": 10}, "replicates >= 100"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD)
def test_recipes_that_contradict_themselves_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        recipe(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"groups": {"g": GroupConfig(title="?", smoothing=(Smoothing(ewma=0.1, over="tokens"),))}},
            "'ewma 0.1 over tokens' smooths over tokens, and the data set keeps boundaries only",
        ),
        ({"heads": {"reference": replace(LINEAR, rows="all")}}, "trains on all rows, and the data set keeps"),
        ({"heads": {"reference": HeadVariant()}}, "reads target_aux, scalars, and the data set holds only target_last"),
        (
            {"groups": {"g": GroupConfig(title="?", signals=(("entropy", "progress"),))}},
            "reads the signal entropy, which is computed from scalars",
        ),
        ({"groups": {"g": GroupConfig(title="?", signals=(("hope",),))}}, "got hope"),
        ({"fixed": {"f": FixedPolicy(thresholds={"hope": 1.0})}}, "unknown signals"),
        (
            {"heads": {"reference": replace(LINEAR, weighting=WeightingConfig(kind="gradient"))}},
            "a linear head has none",
        ),
    ],
)
def test_what_the_data_set_cannot_answer_is_refused_before_anything_is_made(tmp_path, options, message):
    write_dataset(tmp_path / "dataset", dict.fromkeys(SIZES, 3))
    config = make_config(tmp_path, **{"groups": {}, "fixed": {}, "heads": {"reference": LINEAR}} | options)
    with pytest.raises(ValueError, match=message):
        run_ablation(config)
    assert not (tmp_path / "out").exists()


def test_a_data_set_without_a_calibration_split_is_refused(tmp_path):
    write_dataset(tmp_path / "dataset", {"train": 3, "validation": 3, "test": 3})
    with pytest.raises(ValueError, match="all four splits, and calibration has none"):
        run_ablation(make_config(tmp_path, groups={}))
    with pytest.raises(ValueError, match="run build first"):
        run_ablation(make_config(tmp_path / "elsewhere", groups={}))

"""The drafter that comes with the package: what it says of itself, and what it reaches."""

import pytest
import yaml

from ace_learn.artifacts import read_fields
from ace_learn.cli.common import build_parser, parse_config
from ace_learn.contracts import Contract
from ace_learn.drafts.config import DraftTrainConfig
from ace_learn.drafts.report import DraftReport
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.drafting import accepted_of
from ace_learn.models.draft_files import EMBEDDED_DRAFT, draft_folder, load_draft
from ace_learn.models.target import EMBEDDED, TargetConfig, load_target
from ace_learn.reasoner import FAMILIES, contract_spec, drafter_path, generate_problems
from ace_learn.signals import LEARNED
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.tasks import render_prompt
from ace_learn.tasks.base import user_message
from tests.helpers.recipes import ROOT


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"))


def test_it_is_small_and_of_this_very_reasoner(target):
    files = [path for path in drafter_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4e6
    fields = read_fields(drafter_path() / "config.json").fields("ace_learn")
    assert fields.fields("target").text("fingerprint") == target.identity.fingerprint
    assert fields.texts("signals") == LEARNED


def test_it_was_made_by_the_recipe(monkeypatch):
    monkeypatch.chdir(ROOT)
    parser = build_parser(DraftTrainConfig, description="")
    recipe, made_by = (
        parse_config(parser, DraftTrainConfig, [str(path)]).to_json()
        for path in ("training/eagle3.yaml", drafter_path() / "config.yaml")
    )
    differing = {key for key in recipe if recipe[key] != made_by[key]}
    assert differing <= {"trainer"}  # the progress bar
    assert yaml.safe_load((ROOT / "training/eagle3.yaml").read_text())["kind"] == "eagle3"


def test_its_report_fits_its_weights(target):
    report = DraftReport.from_json(read_fields(drafter_path() / "metrics.json"))
    draft = load_draft(draft_folder(EMBEDDED_DRAFT), target)
    assert report.parameters == sum(weight.numel() for weight in draft.parameters())
    assert report.draft.acceptance_length > 3.5
    assert report.draft.signals is not None
    assert report.draft.signals.consistency.auc is not None
    assert report.draft.signals.consistency.auc > 0.88


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 3.8), (1.0, 3.4)])
def test_a_verification_gives_about_four_tokens(target, temperature, least):
    problems = [problem for family in FAMILIES for problem in generate_problems(family, 4, seed=991)]
    sampling = Sampling(temperature=temperature)
    config = DrafterConfig(kind="eagle3", model=EMBEDDED_DRAFT, draft_tokens=4)
    engine = HFEngine(
        target, sampling=sampling, drafter=load_drafter(config, target, sampling), num_draft_tokens=4, batch_size=12
    )
    requests = [
        Request(
            key=key,
            prompt_ids=tuple(
                render_prompt(target.tokenizer, user_message(problem.prompt), thinking=True, markers=target.markers)
            ),
            contract=Contract.from_spec(contract_spec(problem)),
            max_new_tokens=200,
        )
        for key, problem in enumerate(problems)
    ]
    assert accepted_of(engine.generate(requests)).length > least

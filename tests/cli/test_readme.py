"""What the README tells people to type works."""

import re
import shlex
from pathlib import Path

import pytest

from ace_learn.cli import ablate, build, calibrate, run, train
from ace_learn.cli.common import build_parser, parse_config
from ace_learn.cli.run import RunConfig
from ace_learn.evaluate.ablation.config import AblateConfig
from ace_learn.evaluate.calibrate import CalibrateConfig
from ace_learn.heads.config import TrainConfig
from ace_learn.labels.build import BuildConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = {
    "build": BuildConfig, "train": TrainConfig, "calibrate": CalibrateConfig, "run": RunConfig, "ablate": AblateConfig
}  # fmt: skip
COMMANDS = re.findall(
    r"^    python -m ace_learn\.(\w+) (\w+/\S+\.yaml.*?)(?:\s*#.*)?$", PAGES[0].read_text(), re.MULTILINE
)


def test_the_five_commands_are_shown():
    assert [command for command, _ in COMMANDS] == list(CONFIGS)
    assert all(callable(module.main) for module in (build, train, calibrate, run, ablate))


@pytest.mark.parametrize(("command", "arguments"), COMMANDS)
def test_commands_are_read_by_the_real_parser(command, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    parser = build_parser(CONFIGS[command], description="")
    assert isinstance(parse_config(parser, CONFIGS[command], shlex.split(arguments)), CONFIGS[command])


def test_the_api_example_runs(reasoner_target, monkeypatch, capsys):
    """As written, with the head left out: there is none before a demo."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    assert len(example.splitlines()) == 6
    monkeypatch.setattr("ace_learn.engines.loading.load_target", lambda config: reasoner_target)
    exec(compile(example.replace(', head="runs/demo/policy"', ""), "README.md", "exec"), {})
    answer, *_ = capsys.readouterr().out.split()
    (task,) = re.findall(r"Compute ([\d +-]+)\.", example)
    assert answer == str(eval(task))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"\b(?:data_builders|training|inference)/[a-z0-9_-]+\.yaml", text):
        assert (ROOT / name).is_file(), name


def test_the_tree_names_every_module():
    tree = PAGES[0].read_text().split("## The tree")[1]
    for entry in (ROOT / "ace_learn").iterdir():
        if entry.is_dir() and (entry / "__init__.py").exists():
            assert f"  {entry.name}/" in tree, entry.name

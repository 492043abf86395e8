"""Every recipe in the content folders is read by the parser of the command that its first line names."""

import runpy
import shlex
import sys
from pathlib import Path

import pytest

from ace_learn.cli import common

ROOT = Path(__file__).parents[2]
FOLDERS = ("data_builders", "training", "inference", "experiments")
RECIPES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.yaml"))


class ReadError(Exception):
    """Stands in for the work: the recipe was read."""


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_is_read_by_its_command(recipe, monkeypatch):
    first = (ROOT / recipe).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# python -m ace_learn."), f"{recipe}: the first line must be the command that runs it"
    _, _, module, *argv = shlex.split(first.removeprefix("# "))
    assert str(recipe) in argv, f"{recipe}: the command in its first line runs another recipe"
    read = []
    parse = common.parse_config

    def parse_and_stop(*args):
        read.append(parse(*args))
        raise ReadError

    monkeypatch.setattr(common, "parse_config", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    monkeypatch.chdir(ROOT)
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    monkeypatch.delitem(sys.modules, module, raising=False)  # else runpy warns that it runs twice
    with pytest.raises(ReadError):
        runpy.run_module(module, run_name="__main__")
    assert len(read) == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_content_folder_holds_no_package(folder):
    assert (ROOT / folder / "README.md").is_file()
    assert not list((ROOT / folder).rglob("__init__.py"))
    assert "ace_learn" in (ROOT / folder / "README.md").read_text(encoding="utf-8").splitlines()[0]

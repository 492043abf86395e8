"""Every recipe in the content folders: the command in its first line reads it, and goes through its first stage."""

import shlex

import pytest
import yaml

from ace_learn.cli import common
from tests.helpers.recipes import ROOT, RULES, Stage, command, make_mini

FOLDERS = ("data_builders", "training", "inference", "experiments")
RECIPES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.yaml"))


class ReadError(Exception):
    """Stands in for the work: the recipe was read."""


def first_line(recipe):
    """Module and arguments of the command that a recipe's first line names."""
    first = (ROOT / recipe).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# python -m ace_learn."), f"{recipe}: the first line must be the command that runs it"
    _, _, module, *argv = shlex.split(first.removeprefix("# "))
    assert str(recipe) in argv, f"{recipe}: the command in its first line runs another recipe"
    return module, argv


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_is_read_by_its_command(recipe, monkeypatch):
    module, argv = first_line(recipe)
    read = []
    parse = common.parse_config

    def parse_and_stop(*args):
        read.append(parse(*args))
        raise ReadError

    monkeypatch.setattr(common, "parse_config", parse_and_stop)
    monkeypatch.chdir(ROOT)
    with pytest.raises(ReadError):
        command([module, *argv])
    assert len(read) == 1


@pytest.fixture(scope="session")
def mini(tmp_path_factory):
    return make_mini(tmp_path_factory.mktemp("mini"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_goes_through_its_first_stage(recipe, mini, tmp_path, monkeypatch):
    module, argv = first_line(recipe)
    name = " ".join([module, *argv[: argv.index(str(recipe))]])
    if name not in RULES:
        pytest.fail(
            f"{recipe}: there is no rule for `python -m {name}`. Add one to RULES in tests/helpers/recipes.py: a "
            "function that runs the command with flags that make it small, and returns a file that its stage writes"
        )
    monkeypatch.chdir(ROOT)
    values = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))
    written = RULES[name](Stage(module=module, argv=argv, values=values, folder=tmp_path, mini=mini))
    assert written.is_file()
    assert tmp_path in written.parents


@pytest.mark.parametrize("folder", FOLDERS)
def test_content_folder_holds_no_package(folder):
    assert (ROOT / folder / "README.md").is_file()
    assert not list((ROOT / folder).rglob("__init__.py"))
    assert "ace_learn" in (ROOT / folder / "README.md").read_text(encoding="utf-8").splitlines()[0]

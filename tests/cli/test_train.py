"""One command trains heads and drafts: `kind`, in a flag or a recipe, says which."""

import pytest

from ace_learn.cli import train
from ace_learn.cli.common import read_choice
from ace_learn.drafts.config import DraftTrainConfig
from ace_learn.heads.config import TrainConfig


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_flag_beats_the_recipe_and_the_recipe_the_default(recipe):
    path = recipe("kind: eagle3\n")
    assert read_choice([], "kind", default="head") == "head"
    assert read_choice([path], "kind", default="head") == "eagle3"
    assert read_choice(["--seed", "1", path], "kind", default="head") == "eagle3"
    assert read_choice([f"--config={path}", "--kind=mtp"], "kind", default="head") == "mtp"
    assert read_choice(["--kind", "mtp", "--config", path], "kind", default="head") == "mtp"
    assert read_choice(["--output", "kind"], "kind", default="head") == "head"


@pytest.mark.parametrize("text", ["seed: 1\n", "- kind\n", "kind: [\n", ""])
def test_a_recipe_without_the_field_leaves_the_default(recipe, text):
    assert read_choice([recipe(text)], "kind", default="head") == "head"


def test_the_kind_chooses_what_is_trained(recipe, monkeypatch):
    trained = []

    class Stop(Exception):  # noqa: N818 - it ends the command, and is no error
        pass

    def stop(config):
        trained.append(config)
        raise Stop

    monkeypatch.setattr("ace_learn.heads.train.train_head", stop)
    monkeypatch.setattr("ace_learn.drafts.train.train_draft", stop)
    common = "dataset: d\noutput: o\n"
    for text in (common, f"kind: head\n{common}", f"kind: eagle3\ntarget: {{model: m}}\n{common}"):
        with pytest.raises(Stop):
            train.main([recipe(text)])
    with pytest.raises(Stop):
        train.main(["--kind", "mtp", "--target.model", "m", "--dataset", "d", "--output", "o", "--signals", "null"])
    assert [type(config) for config in trained] == [TrainConfig, TrainConfig, DraftTrainConfig, DraftTrainConfig]
    assert trained[3].signals is None


def test_an_unknown_kind_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        train.main(["--kind", "eagle1", "--dataset", "d", "--output", "o"])
    error = capsys.readouterr().err
    assert "kind" in error
    assert "head" in error


def test_help_of_either_kind(capsys):
    for arguments, field in ((["--help"], "--head.arch"), (["--kind", "eagle3", "--help"], "--unrolling.steps")):
        with pytest.raises(SystemExit):
            train.main(arguments)
        assert field in capsys.readouterr().out

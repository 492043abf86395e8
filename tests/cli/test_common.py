import errno
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.artifacts import config_json, dump_config, same_config
from ace_learn.cli.common import build_parser, parse_config, run_command
from ace_learn.tasks.json_object import JsonObject
from tests.cli.toy_config import ToyConfig, ToyHead

if TYPE_CHECKING:
    from nowhere import Absent


def read(*argv, defaults=None):
    parser = build_parser(ToyConfig, description="Toy.", defaults=defaults)
    return parse_config(parser, ToyConfig, argv)


def run(*argv, function=lambda config: None):
    run_command(ToyConfig, function, description="Toy.", argv=argv)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text('model: m\nrate: 7\nhead:\n  width: 5\ncontract: {kind: regex, pattern: "[A-D]", n: "1e3"}\n')
    return str(path)


def failure(capsys, *argv, **kwargs):
    with pytest.raises(SystemExit) as exit_info:
        run(*argv, **kwargs)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert exit_info.value.code == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_defaults_and_flags():
    config = read("--model", "a/b", "--head.arch=linear", "--names", "[p, q]", "--splits", '{"train": 3, "test": 4}')
    assert config == ToyConfig(
        model=Path("a/b"), head=ToyHead(arch="linear"), names=("p", "q"), splits={"train": 3, "test": 4}
    )


def test_command_defaults_replace_the_class_defaults(recipe):
    assert read("--model", "m", defaults={"head.width": 9}).head.width == 9
    assert read(recipe, defaults={"head.width": 9}).head.width == 5


@pytest.mark.parametrize(
    "order", ["recipe first", "config flag", "config flag last", "config with =", "recipe last", "behind ="]
)
def test_flag_beats_recipe_beats_default(recipe, order):
    argv = {
        "recipe first": [recipe, "--rate", "3"],
        "config flag": ["--config", recipe, "--rate", "3"],
        "config flag last": ["--rate", "3", "--config", recipe],
        "config with =": ["--rate", "3", f"--config={recipe}"],
        "recipe last": ["--rate", "3", recipe],
        "behind =": ["--rate=3", recipe],
    }[order]
    config = read(*argv)
    assert (config.rate, config.head.width, config.label) == (3.0, 5, "x")


def test_free_form_values_stay_as_written(recipe):
    assert read(recipe).contract == {"kind": "regex", "pattern": "[A-D]", "n": "1e3"}
    assert read("--model", "m", "--contract", '{"pattern": "[A-D]"}').contract == {"pattern": "[A-D]"}
    assert read("--model", "m", "--contract.kind", "boxed").contract == {"kind": "boxed"}


def test_a_recipe_imports_nothing_it_names(tmp_path):
    marker = tmp_path / "marker"
    spec = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(marker)]}}
    path = tmp_path / "evil.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "contract": {"a": spec, **spec}}))
    assert read(str(path)).contract == {"a": spec, **spec}
    assert not marker.exists()
    path.write_text(yaml.safe_dump({"model": "m", "spare": spec}))
    with pytest.raises(SystemExit):
        run(str(path))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: m\nmodle: n\n", "modle"),
        ("model: m\nhead: {widht: 3}\n", "widht"),
        ("model: m\nhead: {width: many}\n", "head.width"),
        ("model: m\nhead: {arch: cnn}\n", "head.arch"),
        ("rate: 1\n", "model"),
        ("model: [\n", "parsing"),
        ("- 1\n", "Unexpected config"),
        ("model: m\nhead: {width: 0}\n", "width must be positive"),
        ("model: m\nspare: {width: 0}\n", "width must be positive"),
        ("model: m\nbounds: [1]\n", "bounds"),
    ],
)
def test_bad_recipe_is_one_line_and_status_2(tmp_path, capsys, text, named):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert named in failure(capsys, str(path), function=lambda config: pytest.fail("ran"))


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("model: m\nrate: 1\nmodel: n\n", "model", 3),
        ("model: m\nhead:\n  width: 1\n  arch: mlp\n  width: 2\n", "width", 5),
        ("model: m\ncontract: {kind: a,\n  'kind': b}\n", "kind", 3),
        ("model: m\nnames: [{x: 1}, {y: 1, y: 2}]\n", "y", 2),
    ],
)
def test_a_key_that_is_there_twice_is_refused_naming_key_and_line(tmp_path, capsys, text, key, line):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    message = f"{path}: the key '{key}' is there twice, again in line {line}; keep one of them"
    assert message in failure(capsys, str(path))


def test_a_key_that_is_twice_in_a_flag_is_refused(capsys):
    for argv in (["--splits", '{"a": 1, "a": 2}'], ['--splits={"a": 1, "a": 2}']):
        assert "the key 'a' is there twice" in failure(capsys, "--model", "m", *argv)


def test_aliases_that_grow_without_end_are_refused(tmp_path, capsys):
    lines = ["l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 30)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join([*lines, "model: m"]))
    assert "with its aliases" in failure(capsys, str(path))


def test_the_same_key_in_two_places_and_aliases_are_fine(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\nhead: {width: 3}\ncontract: {a: &x {n: 1}, b: *x, width: 1, '1': 2}\n")
    assert read(str(path)).contract == {"a": {"n": 1}, "b": {"n": 1}, "width": 1, "1": 2}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "m", "--rte", "1"], "--rte"),
        (["--model", "m", "stray"], "stray"),
        (["missing.yaml"], "missing.yaml"),
        (["--config"], "--config"),
        ([], "model"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(capsys, argv, named):
    assert named in failure(capsys, *argv)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no rows;\n give some"), "error: no rows; give some\n"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.bin"), "error: x.bin: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: the disk is full; free some space"),
        (OSError(errno.ENOSPC, "No space left on device", "out/a"), "error: out/a: the disk is full"),
        (OSError("tokenizer is missing"), "error: tokenizer is missing\n"),
        (ValueError(), "error: ValueError\n"),
        (MemoryError(), "error: there is not enough memory"),
        (OverflowError("int too large"), "error: a number is too large (int too large)"),
    ],
)
def test_errors_of_the_work_are_one_line_and_status_2(capsys, error, expected):
    def work(config):
        raise error

    assert failure(capsys, "--model", "m", function=work).startswith(expected)


def test_traceback_on_demand(monkeypatch):
    monkeypatch.setenv("ACE_LEARN_TRACEBACK", "1")

    def work(config):
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run("--model", "m", function=work)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        run("--model", "m", function=lambda config: {}["bug"])


def test_interrupt_says_how_to_resume(capsys):
    def work(config):
        raise KeyboardInterrupt

    for resumes, said in ((True, "run the same command again to resume"), (False, "nothing was kept")):
        with pytest.raises(SystemExit) as exit_info:
            run_command(ToyConfig, work, description="Toy.", argv=["--model", "m"], resumes=resumes)
        assert exit_info.value.code == 130
        assert said in capsys.readouterr().err


def test_help_is_made_of_the_field_docstrings(capsys):
    with pytest.raises(SystemExit) as exit_info:
        run("--help")
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    for expected in ("RECIPE.yaml", "Toy.", "Folder of the model.", "--head.width", "Hidden units.", "{linear,mlp}"):
        assert expected in text


def test_printed_config_runs_again(capsys, tmp_path, recipe):
    with pytest.raises(SystemExit) as exit_info:
        run(recipe, "--label", "1e3", "--print_config")
    assert exit_info.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert read(str(path)) == read(recipe, "--label", "1e3")


def test_same_config(tmp_path):
    config, path = ToyConfig(model=Path("a"), rate=1e-5, label="1e3"), tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert same_config(config, path)
    moved = replace(config, model=Path("b"))
    assert not same_config(moved, path)
    assert same_config(moved, path, ignoring=("model",))
    assert not same_config(replace(moved, head=ToyHead(width=3)), path, ignoring=("model",))
    path.write_text(dump_config(config) + "more: 1\n")
    assert not same_config(config, path)
    for damaged in ("", "- 1\n", "a: [\n"):
        path.write_text(damaged)
        assert not same_config(config, path)
    assert config_json(config)["model"] == "a"


texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=8) | st.sampled_from(
    ["1e3", "on", "null", "~", "[a]", "{a: b}", "- a", "a: b", "0x1F", "1_000", ".5", "2020-01-01", "#", "a #b", " "]
)


@given(
    label=texts,
    names=st.lists(texts, max_size=3).map(tuple),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    bounds=st.none() | st.tuples(st.integers(), st.integers()),
    contract=st.none() | st.dictionaries(texts, texts | st.integers() | st.booleans() | st.none(), max_size=3),
    spare=st.none() | st.builds(ToyHead, width=st.integers(1, 9)),
)
def test_dumped_config_reads_back(tmp_path_factory, label, names, rate, bounds, contract, spare):
    config = ToyConfig(
        model=Path("runs/my model"),
        label=label,
        names=names,
        rate=rate,
        bounds=bounds,
        contract=contract,
        spare=spare,
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert read(str(path)) == config


@dataclass(frozen=True, kw_only=True)
class UntypedConfig:
    """Has a free-form field of the wrong type."""

    values: dict[str, object]
    """Values."""


@dataclass(frozen=True, kw_only=True)
class UnresolvedConfig:
    """Has a field whose type does not exist at run time."""

    absent: "Absent"
    """A field."""


@pytest.mark.parametrize(("config_class", "remedy"), [(UntypedConfig, "JsonObject"), (UnresolvedConfig, "run time")])
def test_config_that_would_be_misread_is_refused(config_class, remedy):
    with pytest.raises(TypeError, match=remedy):
        build_parser(config_class, description="Bad.")


def test_full_process(tmp_path):
    script = tmp_path / "toy.py"
    script.write_text(
        "from ace_learn.cli.common import run_command\n"
        "from tests.cli.toy_config import ToyConfig\n"
        "run_command(ToyConfig, lambda config: print(config.model), description='Toy.')\n"
    )
    root = Path(__file__).parents[2]

    def call(*argv):
        command = [sys.executable, "-c", script.read_text(), *argv]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    good, bad = call("--model", "m"), call("--modle", "m")
    assert (good.returncode, good.stdout, good.stderr) == (0, "m\n", "")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: ")
    assert "--modle" in bad.stderr
    assert "Traceback" not in bad.stderr


@dataclass(frozen=True, kw_only=True)
class TargetedConfig:
    """Has a target, as most commands do."""

    target: ToyConfig
    """The target."""
    label: str = "x"
    """A text."""


@pytest.mark.parametrize("argv", [["--model", "m"], ["--model=m"], ["--target.model", "m"]])
def test_model_is_short_for_the_targets(argv):
    parser = build_parser(TargetedConfig, description="Toy.")
    assert parse_config(parser, TargetedConfig, argv).target.model == Path("m")
    assert "--model is short for --target.model." in parser.format_help()


def test_short_flag_beats_the_recipe_and_leaves_other_values_alone(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("target: {model: theirs, rate: 7}\n")
    parser = build_parser(TargetedConfig, description="Toy.")
    config = parse_config(parser, TargetedConfig, ["--model", "mine", "--label=--model", "--config", str(path)])
    assert (config.target.model, config.target.rate, config.label) == (Path("mine"), 7.0, "--model")


def test_a_config_with_its_own_model_has_no_short_flag():
    assert "is short for" not in build_parser(ToyConfig, description="Toy.").format_help()


def test_a_recipe_behind_a_flag_is_its_value(recipe):
    assert read("--model", recipe) == ToyConfig(model=Path(recipe))


@dataclass(frozen=True, kw_only=True)
class DashedConfig:
    """Has a name of two words."""

    base_url: str = ""
    """A text."""
    free: JsonObject = field(default_factory=dict)
    """Any keys."""


@pytest.mark.parametrize("argv", [["--base-url", "a-b"], ["--base-url=a-b"], ["--base_url", "a-b"]])
def test_flags_may_be_spelt_with_dashes(argv):
    parser = build_parser(DashedConfig, description="Toy.")
    config = parse_config(parser, DashedConfig, [*argv, "--free.some-key", "c-d"])
    assert config == DashedConfig(base_url="a-b", free={"some-key": "c-d"})

"""The page names every setting, key, field and file, its recipe is read, and its snippets are Python."""

import ast
import json
import re
from pathlib import Path

from ace_learn.cli.common import build_parser, parse_config
from ace_learn.engines.vllm.command import ServeConfig, server_command
from ace_learn.engines.vllm.options import KEYS
from ace_learn.engines.vllm.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()


def section(title):
    """The tables of a section, as rows of cells."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if set("".join(row)) != {"-"}]


def test_every_setting_is_named_with_its_default():
    defaults = Settings().to_json() | {"acceptance": {"rule": "standard"}}
    _, *rows = section("Settings")
    assert {name.strip("`"): json.loads(default) for name, default, _ in rows} == defaults


def test_every_request_key_is_named():
    _, *rows = section("Request keys")
    assert [row[0].strip("`") for row in rows] == list(KEYS)


def test_every_field_of_a_record_is_named():
    source = ast.parse((ROOT / "ace_learn/engines/vllm/audit.py").read_text())
    (record,) = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "record")
    returned = record.body[-1].value
    fields = {key.value for key in returned.keys}
    _, *rows = section("The record of a request")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == fields


def test_every_metric_is_named():
    source = (ROOT / "ace_learn/engines/vllm/metrics.py").read_text()
    for name in re.findall(r'"(ace_learn_\w+)"', source):
        assert f"`{name}" in PAGE, name


def test_the_recipe_is_read_and_makes_a_command(tmp_path, monkeypatch):
    (recipe,) = re.findall(r"serve\.yaml <<'END'\n(.*?)END\n", PAGE, re.DOTALL)
    path = tmp_path / "serve.yaml"
    path.write_text(recipe)
    monkeypatch.chdir(tmp_path)
    config = parse_config(build_parser(ServeConfig, description=""), ServeConfig, [str(path)])
    assert config.settings == Settings(head="runs/reasoner-exits/policy")
    assert "--speculative-config" in server_command(config, {})


def test_the_snippet_and_the_client_are_python():
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(snippet, "deploy.md", "exec")
    compile((ROOT / "inference" / "client.py").read_text(), "client.py", "exec")


def test_the_files_that_touch_vllm_are_there_and_all_are_listed():
    _, *rows = section("A new release of vLLM")
    listed = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row[0])}
    folder = ROOT / "ace_learn/engines/vllm"
    imported = {
        path.name
        for path in folder.glob("*.py")
        if re.search(r"^ *(?:from|import) vllm\b", path.read_text().split("if TYPE_CHECKING:")[0], re.MULTILINE)
    }
    assert all((folder / name).is_file() for name in listed)
    assert imported - listed <= {"llm.py"}, "name what they touch in docs/deploy.md"

"""The pages "add your own": their files and lines, put into a copy of the package, pass their own tests there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "contracts": ("ace_learn/contracts/date.py", "ace_learn/contracts/kinds.py"),
    "add-a-baseline": ("ace_learn/evaluate/baselines/paragraphs.py", "ace_learn/evaluate/baselines/__init__.py"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("third-party")
    shutil.copytree(ROOT / "ace_learn", root / "ace_learn", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.mark.parametrize("name", PAGES)
def test_the_example_works_with_one_file_and_one_line(name, copy):
    new_file, table = PAGES[name]
    page = (ROOT / "docs" / f"{name}.md").read_text()
    module, line, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert f"The file, `{new_file}`:" in page
    assert f"The line, in `{table}`, beside" in page
    assert not (copy / new_file).exists()
    assert line.count("\n") == 1
    (copy / new_file).write_text(module)
    lines = (copy / table).read_text().splitlines(keepends=True)
    place = max(at for at, other in enumerate(lines) if other.startswith("from ace_learn.") and other < line)
    (copy / table).write_text("".join([*lines[: place + 1], line, *lines[place + 1 :]]))
    check = "import ace_learn, sys; assert ace_learn.__file__.startswith(sys.argv[1])\n"
    run = [sys.executable, "-c", check + program, str(copy)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    finished = subprocess.run(run, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    style = [sys.executable, "-m", "ruff", "check", "--config", "pyproject.toml", new_file, table]
    linted = subprocess.run(style, cwd=copy, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_page(name):
    assert len((ROOT / "docs" / f"{name}.md").read_text().splitlines()) <= 150

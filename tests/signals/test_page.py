"""docs/add-a-signal.md: its example is saved where it says, and does what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ace_learn
from ace_learn.signals import COLUMNS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-signal.md").read_text(encoding="utf-8")
PACKAGE = Path(ace_learn.__file__).parent


@pytest.mark.slow
def test_the_worked_example(tmp_path):
    blocks = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
    assert list(blocks) == ["ace_learn/signals/weakest.py", "tests/signals/test_weakest.py"]
    # The package as it is, but for its folder of signals, which is a copy with the example in it.
    (tmp_path / "ace_learn").mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name not in ("signals", "__pycache__"):
            (tmp_path / "ace_learn" / entry.name).symlink_to(entry)
    shutil.copytree(PACKAGE / "signals", tmp_path / "ace_learn" / "signals")
    (tmp_path / "ace_learn" / "signals" / "weakest.py").write_text(blocks["ace_learn/signals/weakest.py"])
    (tmp_path / "test_weakest.py").write_text(blocks["tests/signals/test_weakest.py"])
    shutil.copy(Path(__file__).with_name("check_example.py"), tmp_path / "test_check_example.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_page_lists_every_column():
    assert [column for columns in COLUMNS.values() for column in columns if f"`{column}`" not in PAGE] == []


def test_the_files_that_the_page_names_exist():
    named = set(re.findall(r"`((?:ace_learn|tests)/[\w/.]+\.py)`", PAGE)) - {
        "ace_learn/signals/weakest.py",
        "tests/signals/test_weakest.py",
    }
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).is_file()] == []

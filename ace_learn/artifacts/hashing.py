"""SHA-256 of files, JSON values and artifact folders."""

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path

from ace_learn.artifacts.atomic import is_temporary
from ace_learn.json_type import JSON

#: What may differ between two runs that made the same artifact.
VOLATILE = frozenset({"provenance.json", "logs", "checkpoints"})


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: JSON) -> str:
    """The SHA-256 of a JSON value, in hex; the order of keys does not matter.

    Raises:
        ValueError: The value holds NaN or infinity, which JSON has not.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_folder(folder: Path, *, exclude: Collection[str] = ()) -> str:
    """The SHA-256 over the sorted relative names and contents of a folder's files, in hex.

    Args:
        folder: The folder.
        exclude: Names of files or folders to leave out, besides `VOLATILE`, hidden and temporary ones.

    Raises:
        OSError: The folder does not exist or a file cannot be read.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    digest = hashlib.sha256()
    for path in sorted(_files(folder, VOLATILE.union(exclude)), key=lambda file: file.relative_to(folder).as_posix()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path, excluded: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _counts(name, excluded)]
        found += [Path(root) / name for name in names if _counts(name, excluded)]
    return found


def _counts(name: str, excluded: frozenset[str]) -> bool:
    return name not in excluded and not name.startswith(".") and not is_temporary(Path(name))

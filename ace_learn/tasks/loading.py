"""Rows from a file, or from a data set of the Hugging Face hub."""

from pathlib import Path

from datasets import Dataset, DownloadMode, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_HUB = "https://huggingface.co/datasets"


def load_file(path: Path) -> Dataset:
    """Reads a table from a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The kind of file is unknown, or it cannot be read as such.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "no such file; --task.path names the data set", str(path))
    if path.suffix not in _BUILDERS:
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; known: {', '.join(_BUILDERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; give a data set with at least one row")
    try:
        return load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {error.__cause__ or error}") from error


def load_hub(name: str, *, subset: str | None, split: str, flag: str, gated: bool = False) -> Dataset:
    """Loads a data set by its name on the Hugging Face hub, or from a local folder laid out like one.

    Args:
        name: Its name, or the folder.
        subset: Name of the subset; None: the default one.
        split: Name of the split, or several joined by "+".
        flag: The flag that takes a local folder instead, for messages.
        gated: The data set is known to ask for its terms to be accepted.

    Raises:
        ValueError: There is no such data set, subset or split, it is gated, or the hub cannot be reached; says what to
            do.
        OSError: The disk is full, or a file cannot be read.
    """
    # A local folder with subsets is cached by its name: without this, an earlier copy's rows might come back.
    mode = DownloadMode.FORCE_REDOWNLOAD if Path(name).is_dir() else DownloadMode.REUSE_DATASET_IF_EXISTS
    try:
        return load_dataset(name, subset, split=split, download_mode=mode)
    except (DatasetsError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        cause = " ".join(str(error.__cause__ or error).split())
        remedy = _remedy(name, error, cause, flag=flag, gated=gated)
        raise ValueError(f"cannot load the data set {name!r} (split {split!r}): {cause}; {remedy}") from error


def _remedy(name: str, error: Exception, cause: str, *, flag: str, gated: bool) -> str:
    copy = f"give a local copy, laid out like it, with {flag} FOLDER"
    if isinstance(error, ConnectionError):
        remedy = f"check the network (is HF_HUB_OFFLINE set?), or {copy}"
        return f"{remedy}. The data set is gated: {_terms(name)}" if gated else remedy
    if isinstance(error, OSError):
        return f"{_terms(name)}, or {copy}" if gated or "gated" in cause else f"check the name, or {copy}"
    if isinstance(error, DatasetsError):
        return f"the files are damaged or of another kind; fetch them again, or {copy}"
    return "choose another with --task.split or --task.subset"


def _terms(name: str) -> str:
    return f"accept its terms at {_HUB}/{name} and log in with `hf auth login`"

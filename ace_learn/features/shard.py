"""One shard of features: a safetensors file, written piece by piece and read by rows through a memory map."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy import ndarray
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.features.spec import SOURCES, FeatureSpec
from ace_learn.signals import COLUMNS, LEARNED

FILE_NAME = "features.safetensors"
FORMAT = "ace_learn.features/1"

#: Names of the splits; the column `split` holds indices into them.
SPLITS = ("train", "validation", "calibration", "test")

#: Integer columns [N] of a shard.
INDEX_COLUMNS = ("trace", "position", "boundary", "split")

FEATURE_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
_STORAGE = {"F32": "<f4", "BF16": "<i2", "F16": "<f2", "I64": "<i8"}


class Column(NamedTuple):
    """Where a tensor lies in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_features(folder: Path, rows: Mapping[str, Tensor]) -> None:
    """Writes FOLDER/features.safetensors, atomically.

    Args:
        folder: The shard's folder, made where it is missing.
        rows: The columns of N rows: any of target_last [N, H], target_aux [N, A*H] and draft [N, D] (floats of one
            dtype), scalars [N, 7], candidates [N, 4] and acceptance [N, 3] float32, targets [N, S] float32 (nan where
            undefined), and trace, position, boundary (-1: no boundary) and split [N] int64.

    Raises:
        ValueError: A column is missing, unknown, or of the wrong dtype or shape.
        OSError: The disk is full or the path cannot be written.
    """
    _check_rows(rows)
    folder.mkdir(parents=True, exist_ok=True)
    with FeatureWriter(folder) as writer:
        writer.append(rows)


class FeatureWriter:
    """Writes FOLDER/features.safetensors piece by piece, so that a shard is never held in memory.

    Each column grows in a file of its own; when the block ends without an error they become one file, which appears
    whole or not at all.
    """

    def __init__(self, folder: Path) -> None:
        """Writes into an existing folder."""
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def append(self, rows: Mapping[str, Tensor]) -> None:
        """Adds rows, as `write_features` takes them.

        Raises:
            ValueError: A column is missing, unknown, of the wrong dtype or shape, or other than in earlier pieces.
            OSError: The disk is full.
        """
        _check_rows(rows)
        kinds = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in rows.items()}
        if self._shapes and kinds != {n: (self._dtypes[n], torch.Size(s[1:])) for n, s in self._shapes.items()}:
            raise ValueError(f"the columns {', '.join(rows)} are not those of the rows before them")
        mode = "ab" if self._shapes else "wb"
        for name, tensor in rows.items():
            before = self._shapes.get(name, (0,))[0]
            self._shapes[name] = (before + tensor.shape[0], *tensor.shape[1:])
            self._dtypes[name] = tensor.dtype
            with self._part(name).open(mode) as file:
                file.write(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Joins the columns, or drops them after an error."""
        try:
            if kind is None:
                self._join()
        finally:
            for name in self._shapes:
                self._part(name).unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._folder / f"{name}.part"

    def _join(self) -> None:
        assert self._shapes, "a shard has at least one piece, though it may hold no rows"
        header: dict[str, JSON] = {"__metadata__": {"format": FORMAT}}
        order = sorted(self._shapes, key=lambda name: (-self._dtypes[name].itemsize, name))  # keeps tensors aligned
        end = 0
        for name in order:
            begin, end = end, end + self._part(name).stat().st_size
            shape: list[JSON] = list(self._shapes[name])
            header[name] = {"dtype": _TYPE_NAMES[self._dtypes[name]], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        temporary = self._part(FILE_NAME)
        try:
            with temporary.open("xb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name in order:
                    with self._part(name).open("rb") as part:
                        shutil.copyfileobj(part, file, length=1 << 22)
                    self._part(name).unlink()
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / FILE_NAME)
        finally:
            temporary.unlink(missing_ok=True)


def _check_rows(rows: Mapping[str, Tensor]) -> None:
    required = {"targets", *INDEX_COLUMNS}
    known = required.union(SOURCES)
    if not required.issubset(rows) or not known.issuperset(rows) or required.issuperset(rows):
        raise ValueError(
            f"features need the columns {', '.join(sorted(required))} and one or more of {', '.join(SOURCES)}; "
            f"got {', '.join(rows)}"
        )
    count = rows["trace"].shape[0]
    for name, tensor in rows.items():
        expected = 1 if name in INDEX_COLUMNS else 2
        if tensor.ndim != expected or tensor.shape[0] != count:
            raise ValueError(f"column {name} must have {expected} axes and {count} rows; it is {tuple(tensor.shape)}")
        if name in INDEX_COLUMNS and tensor.dtype != torch.int64:
            raise ValueError(f"column {name} must be int64; it is {tensor.dtype}")
        if name in (*COLUMNS, "targets") and tensor.dtype != torch.float32:
            raise ValueError(f"column {name} must be float32; it is {tensor.dtype}")
    hidden = {rows[name].dtype for name in ("target_last", "target_aux", "draft") if name in rows}
    if len(hidden) > 1 or not hidden.issubset({torch.float32, torch.bfloat16, torch.float16}):
        raise ValueError(f"hidden states must share one dtype among {', '.join(FEATURE_DTYPES)}; got {hidden}")
    widths = {source: len(columns) for source, columns in COLUMNS.items()} | {"targets": len(LEARNED)}
    for name, width in widths.items():
        if name in rows and rows[name].shape[1] != width:
            raise ValueError(f"column {name} must have {width} columns; it is {tuple(rows[name].shape)}")


class Shard:
    """A features file that has been checked and whose rows can be read without loading it.

    Attributes:
        path: The safetensors file.
        num_rows: N of this shard.
    """

    def __init__(self, path: Path, *, spec: FeatureSpec, dtype: str) -> None:
        """Opens and checks a shard; its tensors are not read.

        Args:
            path: The safetensors file.
            spec: What dataset.json says the features are.
            dtype: What dataset.json says the hidden states' dtype is, a key of `FEATURE_DTYPES`.

        Raises:
            ValueError: The file is missing, cut off, no safetensors file, or does not fit `spec` and `dtype`; the
                message names the shard and what to do.
        """
        self.path = path
        self._columns = _read_header(path)
        self.num_rows = self._columns["trace"].shape[0] if self._columns.get("trace", _NOWHERE).shape else 0
        for name, expected in _expected_columns(spec, dtype, self.num_rows).items():
            column = self._columns.get(name, _NOWHERE)
            if (column.dtype, column.shape) != expected:
                raise broken_shard(
                    path, f"column {name} is {column.dtype} {list(column.shape)}, not {expected[0]} {list(expected[1])}"
                )

    def take(self, name: str, rows: Int64[ndarray, " n"] | None = None) -> Shaped[Tensor, "n ..."]:
        """Rows of a column, in the column's own dtype.

        Args:
            name: The column.
            rows: Row numbers within the shard, best in ascending order; None: all of them.

        Returns:
            A copy of the rows; only their pages of the file are touched.
        """
        column = self._columns[name]
        if self.num_rows == 0:
            view = np.empty(column.shape, _STORAGE[column.dtype])
        else:
            view = np.memmap(self.path, dtype=_STORAGE[column.dtype], mode="r", offset=column.begin, shape=column.shape)
        taken = torch.from_numpy(np.array(view) if rows is None else np.take(view, rows, axis=0))
        return taken.view(torch.bfloat16) if column.dtype == "BF16" else taken


_NOWHERE = Column("missing", (), 0, 0)


def _expected_columns(spec: FeatureSpec, dtype: str, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    columns: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(INDEX_COLUMNS, ("I64", (rows,)))
    columns["targets"] = ("F32", (rows, len(LEARNED)))
    for source in spec.sources:
        columns[source] = ("F32" if source in COLUMNS else FEATURE_DTYPES[dtype], (rows, spec.width(source)))
    return columns


def _read_header(path: Path) -> dict[str, Column]:
    if not path.is_file():
        raise broken_shard(path, "the file is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise broken_shard(path, "the file is cut off, or no safetensors file")
        text = file.read(length)
    try:
        header = JsonFields.of(json.loads(text), where="header")
        columns = {name: _column(header.fields(name), 8 + length) for name in header.data if name != "__metadata__"}
        file_format = header.fields("__metadata__").text("format")
    except ValueError as error:
        raise broken_shard(path, f"the header cannot be read ({error})") from error
    if file_format != FORMAT:
        raise broken_shard(path, f"the format is {file_format}, not {FORMAT}")
    end = max((column.end for column in columns.values()), default=0)
    if size != end:
        raise broken_shard(path, f"the file has {size:,} bytes where its header announces {end:,}")
    return columns


def _column(entry: JsonFields, data: int) -> Column:
    dtype, shape = entry.text("dtype"), entry.integers("shape")
    offsets = entry.integers("data_offsets")
    if len(offsets) != 2 or dtype not in _STORAGE or min(shape, default=0) < 0:
        raise ValueError(f"{entry.where} is not a tensor of this format")
    if offsets[0] < 0 or offsets[1] - offsets[0] != np.dtype(_STORAGE[dtype]).itemsize * int(np.prod(shape)):
        raise ValueError(f"{entry.where} has a size that does not fit its shape")
    return Column(dtype, shape, data + offsets[0], data + offsets[1])


def broken_shard(path: Path, what: str) -> ValueError:
    """The error that a file of a shard is not usable, with the remedy."""
    what = " ".join(what.split())
    return ValueError(
        f"shard {path.parent.name} is not usable: {path}: {what}. Delete the folder {path.parent} and run build again: "
        "it makes the missing shard anew and keeps the others"
    )

"""What no linter checks: sizes, and that the shape checks of the test run are on."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "ace_learn").rglob("*.py"))


def function_lengths():
    """Lines of each function, its docstring left out."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                text = ast.get_docstring(node, clean=False)
                documented = 0 if text is None else first.end_lineno - first.lineno + 1
                yield f"{path.relative_to(ROOT)}::{node.name}", node.end_lineno - node.lineno + 1 - documented


def test_functions_are_short():
    lengths = dict(function_lengths())
    assert {name: length for name, length in lengths.items() if length > 80} == {}
    assert np.percentile(list(lengths.values()), 90) <= 35


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_calls_are_checked_for_their_shapes(pytestconfig):
    if not pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("this run is without shape checks")
    from ace_learn.thinking import BoundaryTables

    tables = BoundaryTables.from_texts(["a", "\n\n"])
    tables.advance(torch.zeros(1), torch.tensor([1]))
    with pytest.raises(TypeError, match="advance"):
        tables.advance(torch.zeros(1), torch.tensor([1, 0]))

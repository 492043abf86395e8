"""Readable errors for wrong JSON."""

from pathlib import Path

import pytest

from ace_learn.artifacts import JSON, JsonFields, read_fields


def test_typed_fields() -> None:
    fields = JsonFields.of(
        {"t": "x", "i": 3, "n": 2, "b": True, "o": {"k": "v"}, "ts": ["a"], "is": [1, 2]}, where="here"
    )
    assert (fields.text("t"), fields.integer("i"), fields.number("n"), fields.boolean("b")) == ("x", 3, 2.0, True)
    assert fields.fields("o").text("k") == "v"
    assert fields.texts("ts") == ("a",)
    assert fields.integers("is") == (1, 2)


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        ({}, "text", "has no field 'x'"),
        ({"x": 1}, "text", "must be a string, but it is 1"),
        ({"x": True}, "integer", "must be an integer, but it is true"),
        ({"x": "1"}, "number", "must be a number"),
        ({"x": 1}, "boolean", "must be true or false"),
        ({"x": [1]}, "fields", "must be a JSON object"),
        ({"x": {}}, "items", "must be a list"),
        ({"x": ["a", 1]}, "texts", "must be a list of strings"),
        ({"x": [1, True]}, "integers", "must be a list of integers"),
    ],
)
def test_wrong_fields_are_named(value: JSON, read: str, message: str) -> None:
    fields = JsonFields.of(value, where="FILE")
    with pytest.raises(ValueError, match=f"FILE.*{message}"):
        getattr(fields, read)("x")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"x": ')
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        read_fields(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        read_fields(path)

"""A reader that turns a JSON object into typed fields with readable errors."""

import json
from dataclasses import dataclass
from pathlib import Path

from ace_learn.json_type import JSON


@dataclass(frozen=True, kw_only=True)
class JsonFields:
    """A JSON object whose fields are read one by one with the type that the caller expects.

    Attributes:
        data: The decoded object.
        where: What the object is, for messages (a path, or a path and a field).
    """

    data: dict[str, JSON]
    where: str

    @classmethod
    def of(cls, value: JSON, *, where: str) -> "JsonFields":
        """Wraps a decoded value.

        Raises:
            ValueError: The value is not a JSON object.
        """
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a JSON object, but it is {_kind(value)}")
        return cls(data=value, where=where)

    def get(self, key: str) -> JSON:
        """The raw value of a field.

        Raises:
            ValueError: The field is missing.
        """
        if key not in self.data:
            raise ValueError(f"{self.where} has no field {key!r}; it may come from another version")
        return self.data[key]

    def text(self, key: str) -> str:
        """A string field."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str) -> int:
        """An integer field (true and false are not integers)."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str) -> float:
        """A number field."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        try:
            return float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that is not too large", value) from error

    def boolean(self, key: str) -> bool:
        """A boolean field."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def fields(self, key: str) -> "JsonFields":
        """A nested object."""
        return JsonFields.of(self.get(key), where=f"{self.where}: field {key!r}")

    def items(self, key: str) -> list[JSON]:
        """A list field."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(key)
        texts = tuple(value for value in values if isinstance(value, str))
        if len(texts) != len(values):
            raise self._wrong(key, "a list of strings", values)
        return texts

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        values = self.items(key)
        numbers = tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))
        if len(numbers) != len(values):
            raise self._wrong(key, "a list of integers", values)
        return numbers

    def _wrong(self, key: str, expected: str, value: JSON) -> ValueError:
        return ValueError(f"{self.where}: field {key!r} must be {expected}, but it is {_kind(value)}")


def read_json(path: Path) -> JSON:
    """Reads a JSON file.

    Raises:
        ValueError: The file is not valid JSON in UTF-8.
        OSError: The file cannot be read.
    """
    try:
        value: JSON = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and write it again") from error
    return value


def read_fields(path: Path) -> JsonFields:
    """Reads a JSON file that holds one object.

    Raises:
        ValueError: The file is not valid JSON, or no object.
        OSError: The file cannot be read.
    """
    return JsonFields.of(read_json(path), where=str(path))


def _kind(value: JSON) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."

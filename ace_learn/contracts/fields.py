"""Typed reading of a contract's spec, with errors that name the key and the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Self

from ace_learn.json_type import JSON


class Fields:
    """The keys of one spec; remembers which were asked for, so that a misspelt one is found."""

    def __init__(self, spec: Mapping[str, JSON]) -> None:
        """Read from `spec`."""
        self._spec = dict(spec)
        self._asked: list[str] = []

    @classmethod
    def of(cls, spec: Mapping[str, JSON] | JSON) -> Self:
        """Read from a mapping or from JSON text.

        Raises:
            ValueError: The text is no JSON object.
        """
        if isinstance(spec, str):
            try:
                loaded: JSON = json.loads(spec)
            except ValueError as error:
                raise ValueError(f"a contract spec must be a JSON object: {error}") from error
        elif isinstance(spec, Mapping):
            loaded = dict(spec)
        else:
            loaded = None
        if not isinstance(loaded, dict):
            raise ValueError('a contract spec must be an object like {"kind": "boxed"}')
        return cls(loaded)

    def value(self, key: str, default: JSON = None) -> JSON:
        """The value of `key` as it is."""
        self._asked.append(key)
        return self._spec.get(key, default)

    def string(self, key: str, default: str | None = None) -> str:
        """A string; required if there is no default."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str) -> int | None:
        """An optional integer; `true` is none."""
        value = self.value(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "an integer", value)
        return value

    def strings(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A list of strings; required if there is no default."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list of strings", value)
        strings = tuple(item for item in value if isinstance(item, str))
        if len(strings) != len(value):
            raise self._wrong(key, "a list of strings", value)
        return strings

    def finish(self) -> None:
        """Refuse keys that nobody asked for."""
        unknown = [key for key in self._spec if key not in self._asked]
        if unknown:
            raise ValueError(
                f"unknown contract key {unknown[0]!r}; "
                f"contract kind {self._spec.get('kind')!r} takes: {', '.join(self._asked)}"
            )

    def _wrong(self, key: str, wanted: str, value: JSON) -> ValueError:
        if key not in self._spec:
            return ValueError(f"contract key {key!r} is missing; it must be {wanted}")
        return ValueError(f"contract key {key!r} must be {wanted}, not {value!r}")

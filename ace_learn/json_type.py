"""The type of JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    JSON: TypeAlias = Union[bool, int, float, str, list["JSON"], dict[str, "JSON"], None]  # noqa: UP007
    """A JSON value. (With Union, since a quoted name cannot stand beside `|` in Python 3.11.)"""
else:
    # The shape checks of the tests look one level deep: they cannot follow an alias into itself.
    JSON = bool | int | float | str | list | dict | None

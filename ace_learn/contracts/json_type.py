"""The type of JSON values."""

from __future__ import annotations

from typing import TypeAlias, Union

JSON: TypeAlias = Union[bool, int, float, str, list["JSON"], dict[str, "JSON"], None]  # noqa: UP007
"""A JSON value. (Written with Union since a quoted name cannot stand beside `|` in Python 3.11.)"""

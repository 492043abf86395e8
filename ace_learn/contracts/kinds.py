"""The table of contract kinds. A new kind is one file and one line here."""

from __future__ import annotations

from ace_learn.contracts.base import Contract
from ace_learn.contracts.boxed import Boxed
from ace_learn.contracts.choice import Choice
from ace_learn.contracts.integer import Integer
from ace_learn.contracts.json_schema import JsonSchema
from ace_learn.contracts.label import Label
from ace_learn.contracts.tag import Tag

_ALL: tuple[type[Contract], ...] = (Boxed, Integer, Choice, Label, Tag, JsonSchema)

KINDS: dict[str, type[Contract]] = {contract.kind: contract for contract in _ALL}

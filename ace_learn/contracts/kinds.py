"""The table of contract kinds. A new kind is one file and one line here, the import of its class.

A program may add a kind of its own for as long as it runs: `KINDS[Mine.kind] = Mine`.
"""

from __future__ import annotations

from ace_learn.contracts.base import Contract
from ace_learn.contracts.boxed import Boxed as Boxed
from ace_learn.contracts.choice import Choice as Choice
from ace_learn.contracts.integer import Integer as Integer
from ace_learn.contracts.json_schema import JsonSchema as JsonSchema
from ace_learn.contracts.label import Label as Label
from ace_learn.contracts.patch import Patch as Patch
from ace_learn.contracts.regex import Regex as Regex
from ace_learn.contracts.tag import Tag as Tag

KINDS: dict[str, type[Contract]] = {
    value.kind: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Contract) and value is not Contract
}
"""`kind` in a spec -> class, for every class imported above."""

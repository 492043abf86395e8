"""The first outermost JSON object or array that fits a schema.

Strict JSON: no duplicate keys, no NaN or Infinity, no raw line breaks in strings, no comments. An
object that is closed but breaks the schema is passed over with all that is inside it; so is text
that only begins like JSON. Numbers stay as written: 42.0 is an integer of the schema and stays a
float, `true` is not 1. Patterns run on a linear-time engine, and nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import jsonschema_rs

from ace_learn.contracts.base import Contract, common_fields, json_equal
from ace_learn.contracts.committer import Commit
from ace_learn.contracts.fields import Fields
from ace_learn.contracts.json_references import refuse_reference_cycles
from ace_learn.contracts.json_text import MAX_CHARS, MAX_DEPTH, parse, read_candidate
from ace_learn.contracts.source import Source, Step
from ace_learn.json_type import JSON


@dataclass(frozen=True, kw_only=True)
class JsonSchema(Contract):
    """The answer is a JSON object or array that fits a schema."""

    kind: ClassVar[str] = "json"
    looks_ahead: ClassVar[bool] = False

    schema_text: str = "true"
    """The schema as JSON text, which makes the contract hashable; see :meth:`of`."""

    def __post_init__(self) -> None:
        """Refuse a schema that does not compile or that points elsewhere."""
        super().__post_init__()
        _validator(self.schema_text)

    @classmethod
    def of(cls, schema: Mapping[str, JSON] | bool) -> Self:
        """The contract of a schema."""
        return cls(schema_text=_dump(schema if isinstance(schema, bool) else dict(schema)))

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Build the contract from its spec."""
        schema = fields.value("schema")
        if not isinstance(schema, dict | bool):
            raise ValueError(f'contract key "schema" must be a JSON Schema object, not {schema!r}')
        return cls(schema_text=_dump(schema), **common_fields(fields)._asdict())

    def own_fields(self) -> dict[str, JSON]:
        """The schema."""
        return {"schema": json.loads(self.schema_text)}

    def scan(self, source: Source) -> Step[Commit | None]:
        """Read until an object or array closes that fits the schema."""
        while (text := (yield from read_candidate(source))) is not None:
            answer = _parsed(text)
            if answer is not None and self.valid(answer):
                return Commit(answer, source.offset)
        return None

    def valid(self, answer: JSON) -> bool:
        """An object or array that fits the schema."""
        if not isinstance(answer, dict | list) or not _shallow(answer):
            return False
        return _validator(self.schema_text).is_valid(answer)

    def same(self, a: JSON, b: JSON) -> bool:
        """Equal as JSON Schema has it: 1 is 1.0, true is not 1, key order is irrelevant."""
        return json_equal(a, b)

    def instruction(self) -> str:
        """The sentence for the prompt."""
        return f"Answer with JSON that fits this schema, and nothing else: {self.schema_text}"


def _dump(schema: JSON) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _parsed(text: str) -> JSON:
    try:
        return parse(text)
    except ValueError:
        return None


def _shallow(answer: JSON) -> bool:
    """Whether the answer is under the caps, without recursion."""
    level: list[JSON] = [answer]
    size = 0
    for _ in range(MAX_DEPTH + 1):
        size += len(level)
        if not level or size > MAX_CHARS:
            return not level
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return not any(isinstance(value, dict | list) for value in level)


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> jsonschema_rs.Validator:
    """Compile a schema: no remote references, patterns on the linear-time engine."""
    try:
        schema = json.loads(schema_text)
        refuse_reference_cycles(schema)
        return jsonschema_rs.validator_for(schema, pattern_options=jsonschema_rs.RegexOptions(), offline=True)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"the contract's schema cannot be used: {reason} (references must point into the schema "
            "itself; patterns know no look-around and no back-references)"
        ) from error

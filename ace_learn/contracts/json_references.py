"""References of a JSON Schema that lead nowhere but back to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote

from ace_learn.json_type import JSON

_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose schemas judge the very value that the schema around them judges."""


def refuse_reference_cycles(schema: JSON) -> None:
    """Refuses a schema that is defined by itself, as by `{"$ref": "#"}`: it says nothing of the value.

    A schema that refers to itself for a part of the value (a tree, whose children are trees) is fine.

    Raises:
        ValueError: Names the reference.
    """
    checked: set[int] = set()
    for start in _objects(schema):
        path: list[dict[str, JSON]] = []
        stack = [(start, False)]
        while stack:
            node, left = stack.pop()
            if left:
                path.pop()
                continue
            if any(node is above for above in path):
                references = [reference for above in path if (reference := _reference(above)) is not None]
                raise ValueError(f"the reference {references[-1]!r} leads back to itself, so it says nothing")
            if id(node) in checked:
                continue
            checked.add(id(node))
            path.append(node)
            stack.append((node, True))
            stack += [(judge, False) for judge in _judges_of_same_value(schema, node)]


def _judges_of_same_value(root: JSON, node: dict[str, JSON]) -> Iterator[dict[str, JSON]]:
    target = _resolve(root, _reference(node))
    if target is not None:
        yield target
    for keyword in _SAME_VALUE:
        inner = node.get(keyword)
        for judge in inner if isinstance(inner, list) else [inner]:
            if isinstance(judge, dict):
                yield judge


def _reference(node: dict[str, JSON]) -> str | None:
    reference = node.get("$ref", node.get("$dynamicRef", node.get("$recursiveRef")))
    return reference if isinstance(reference, str) else None


def _resolve(root: JSON, reference: str | None) -> dict[str, JSON] | None:
    """What a reference into the schema itself points to; None for any other, which the compiler judges."""
    if reference is None or not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        anchors = ("$anchor", "$dynamicAnchor")
        return next((node for node in _objects(root) if fragment in [node.get(name) for name in anchors]), None)
    found = root
    for key in fragment.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if isinstance(found, dict) else None


def _objects(value: JSON) -> Iterator[dict[str, JSON]]:
    """Every object in a value, itself included, without recursion."""
    level = [value]
    while level:
        yield from (item for item in level if isinstance(item, dict))
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]

import re

import pytest

from ace_learn.contracts import Boxed, Choice, Contract, Integer, JsonSchema


def test_a_spec_may_be_json_text():
    assert Contract.from_spec('{"kind": "integer", "maximum": 9}') == Integer(maximum=9)


def test_python_builds_the_same():
    assert Contract.from_spec({"kind": "boxed"}) == Boxed()
    assert Contract.from_spec({"kind": "choice", "options": ["A", "B"]}) == Choice(options=("A", "B"))
    schema = {"type": "object"}
    assert Contract.from_spec({"kind": "json", "schema": schema}) == JsonSchema.of(schema)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("[1]", "must be an object"),
        ("{", "must be a JSON object"),
        ({}, "'kind' is missing"),
        ({"kind": 3}, "'kind' must be a string, not 3"),
        ({"kind": "boxes"}, "unknown contract kind 'boxes'; known kinds: boxed, choice, integer"),
        (
            {"kind": "integer", "min": 3},
            "unknown contract key 'min'; contract kind 'integer' takes: kind, minimum, maximum",
        ),
        ({"kind": "integer", "minimum": "3"}, "'minimum' must be an integer, not '3'"),
        ({"kind": "integer", "minimum": True}, "'minimum' must be an integer, not True"),
        ({"kind": "integer", "minimum": 3, "maximum": 2}, "minimum 3 is above maximum 2"),
        ({"kind": "choice"}, "'options' is missing; it must be a list of strings"),
        ({"kind": "choice", "options": "AB"}, "'options' must be a list of strings"),
        ({"kind": "choice", "options": ["A", 1]}, "'options' must be a list of strings"),
        ({"kind": "choice", "options": []}, "options is empty"),
        ({"kind": "choice", "options": ["A", "A"]}, "'A' is there twice"),
        ({"kind": "choice", "options": ["A", " "]}, "without outer spaces"),
        ({"kind": "choice", "options": ["A"], "cues": []}, "cues is empty"),
        ({"kind": "choice", "options": ["A"], "cues": ["x" * 65]}, "1 to 64 characters"),
        ({"kind": "label", "labels": ["A", "A"]}, "'A' is there twice"),
        ({"kind": "tag", "tag": "<a>"}, "must be a name"),
        ({"kind": "json"}, '"schema" must be a JSON Schema object'),
        ({"kind": "json", "schema": {"type": "foo"}}, "schema cannot be used"),
        ({"kind": "boxed", "scope": "all"}, 'write "answer" or "anywhere"'),
        ({"kind": "boxed", "think_start": "</think>"}, "part of one another"),
        ({"kind": "boxed", "think_end": ""}, "part of one another"),
    ],
)
def test_a_wrong_spec_is_refused_with_a_remedy(spec, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Contract.from_spec(spec)


@pytest.mark.parametrize(
    "reference", ["http://example.com/a.json", "https://example.com/a", "file:///etc/passwd", "other.json"]
)
def test_a_remote_reference_is_refused(reference):
    with pytest.raises(ValueError, match="references must point into the schema"):
        Contract.from_spec({"kind": "json", "schema": {"properties": {"a": {"$ref": reference}}}})


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "#/properties/x"),
        ({"anyOf": [{"type": "array"}, {"not": {"$ref": "#"}}]}, "#"),
        ({"$ref": "#t", "$anchor": "t"}, "#t"),
        ({"$defs": {"a b/c": {"$ref": "#/$defs/a%20b~1c"}}}, "#/$defs/a%20b~1c"),
        ({"allOf": [{"$ref": "#/allOf/0"}]}, "#/allOf/0"),
    ],
)
def test_a_schema_that_is_defined_by_itself_is_refused(schema, reference):
    with pytest.raises(ValueError, match=re.escape(f"the reference {reference!r} leads back to itself")):
        Contract.from_spec({"kind": "json", "schema": schema})


def test_a_schema_of_trees_is_fine():
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert Contract.from_spec({"kind": "json", "schema": tree}).valid({"children": [{"children": []}]})
    both = {"$defs": {"a": {"type": "object"}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    assert Contract.from_spec({"kind": "json", "schema": both}).valid({})


def test_own_markers_and_scope_survive_the_round_trip():
    spec = {"kind": "boxed", "scope": "anywhere", "think_start": "[THINK]", "think_end": "[/THINK]"}
    assert Contract.from_spec(spec).to_spec() == spec

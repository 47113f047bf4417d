from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.constraints.endless import is_endless_lark, is_endless_schema

SELF = {"$ref": "#"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
A = {"type": "object", "required": ["a"]}
ONE = {"type": "object", "minProperties": 1, "additionalProperties": False}
LIST = {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 2}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        pytest.param({}, False, id="anything"),
        pytest.param(True, False, id="true"),
        pytest.param(SELF, True, id="only itself"),
        pytest.param({"type": "object", "properties": {"a": SELF}}, False, id="optional property"),
        pytest.param({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, True, id="required property"),
        pytest.param({"type": "object", "properties": {"a": SELF}, "required": [["a"], 1]}, False, id="no names"),
        pytest.param({"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]}, False, id="or null"),
        pytest.param({"properties": {"a": SELF}, "required": ["a"]}, False, id="or a value of another type"),
        pytest.param({**A, "additionalProperties": SELF}, True, id="required additional property"),
        pytest.param({**A, "additionalProperties": SELF, "properties": {"a": {}}}, False, id="other properties"),
        pytest.param({**A, "additionalProperties": {}}, False, id="additional property that ends"),
        pytest.param({**A, "additionalProperties": False}, False, id="forbidden property"),
        pytest.param({"type": "object", "additionalProperties": SELF}, False, id="optional additional property"),
        pytest.param({**A, "patternProperties": {"^a": SELF}}, True, id="property with a pattern"),
        pytest.param(
            {**A, "patternProperties": {"^b$": SELF, "^.": SELF, "^a$": {}}}, False, id="pattern that may not match"
        ),
        pytest.param({**ONE, "properties": {"a": SELF}}, True, id="at least one property"),
        pytest.param({**ONE, "properties": {"a": SELF, "b": {}}}, False, id="at least one property, another ends"),
        pytest.param({"type": "object", "minProperties": 1, "properties": {"a": SELF}}, False, id="any property"),
        pytest.param({"type": "object", "minProperties": 1, "additionalProperties": SELF}, True, id="any, all endless"),
        pytest.param({"type": "array", "items": SELF}, False, id="array that may be empty"),
        pytest.param({"type": "array", "items": SELF, "minItems": 1}, True, id="array with an item"),
        pytest.param({"type": "array", "prefixItems": [{}, SELF], "minItems": 1}, False, id="first item"),
        pytest.param({"type": "array", "prefixItems": [{}, SELF], "minItems": 2}, True, id="second item"),
        pytest.param({"type": "array", "items": [{}, SELF], "minItems": 2}, True, id="second item of draft 7"),
        pytest.param({"anyOf": [SELF, {"type": "string"}]}, False, id="an alternative that ends"),
        pytest.param({"allOf": [{"type": "object"}, SELF]}, True, id="all of, with itself"),
        pytest.param({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, True, id="linked list"),
        pytest.param({"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [NODE, LIST]}}}, True, id="mutual"),
        pytest.param({"$ref": "#/$defs/node", "$defs": {"node": {"enum": [1]}}}, False, id="enum"),
        pytest.param({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": SELF}}, True, id="escaped pointer"),
        pytest.param({"$ref": "https://example.com"}, False, id="another document"),
        pytest.param({"$ref": "#/$defs/missing"}, False, id="missing target"),
        pytest.param({"type": "object", "properties": 3, "required": 4, "allOf": 5}, False, id="malformed"),
    ],
)
def test_an_endless_schema_is_recognised(schema: Any, expected: bool) -> None:
    assert is_endless_schema(schema) is expected


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        pytest.param('start: "a" start', True, id="only itself"),
        pytest.param('start: ("a" | "b") start', True, id="after alternatives"),
        pytest.param('start: "a" | "b" start', False, id="an alternative that ends"),
        pytest.param('start: "a" start?', False, id="optional"),
        pytest.param('start: "a" start*', False, id="repeated"),
        pytest.param('start: "a" start+', True, id="at least once"),
        pytest.param('start: "a" start{2,3}', True, id="twice"),
        pytest.param('start: "a" start{0,3}', False, id="at most three times"),
        pytest.param('start: "a" [start]', False, id="in square brackets"),
        pytest.param('start: a\na: "x" b\nb: /[a-z]/ a', True, id="mutual"),
        pytest.param('start: a\na: "x" b\nb: /[a-z]/ (a | "end")', False, id="mutual with an end"),
        pytest.param('start: "start" // start\n', False, id="in a string and a comment"),
        pytest.param('start: "a"\nunused: unused', False, id="unused rule"),
        pytest.param('start: a\na[capture="x", stop=/b/]: "x" | start', False, id="attributes"),
        pytest.param('start: a\na[capture="x", stop=/b/]: "x" start', True, id="attributes of an endless rule"),
        pytest.param('start: "a"\n  | "b" start\n', False, id="alternatives on lines"),
        pytest.param('start: %json { "type": "null" }\n', False, id="schema"),
        pytest.param("start: " + "(" * 5000 + "start" + ")" * 5000, True, id="deep"),
        pytest.param("nonsense", False, id="not a grammar"),
    ],
)
def test_an_endless_grammar_is_recognised(grammar: str, expected: bool) -> None:
    assert is_endless_lark(grammar) is expected

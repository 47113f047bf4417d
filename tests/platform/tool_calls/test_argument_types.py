from __future__ import annotations

import time
from typing import Any

import pytest

from loramux.platform.tool_calls.argument_types import argument_types, json_argument


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"x": {"type": "string"}}}, {"string"}),
        ({"properties": {"x": {"type": "integer", "nullable": True}}}, {"number", "null"}),
        ({"properties": {"x": {"type": ["integer", "null"]}}}, {"number", "null"}),
        ({"properties": {"x": {"enum": ["a", 1, None, 1.5]}}}, {"string", "number", "null"}),
        ({"properties": {"x": {"enum": [True, [], {}]}}}, {"boolean", "array", "object"}),
        ({"properties": {"x": {"const": "a"}}}, {"string"}),
        ({"properties": {"x": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}}}, {"string", "number"}),
        ({"properties": {"x": {"oneOf": [{"type": "string"}, {}]}}}, None),
        ({"properties": {"x": {"allOf": [{"minLength": 1}, {"type": "string"}]}}}, {"string"}),
        ({"properties": {"x": {"type": "string", "$ref": "#/$defs/missing"}}}, {"string"}),
        ({"$ref": "#/$defs/p"}, {"string"}),
        ({"allOf": [{"required": ["x"]}, {"$ref": "#/$defs/p"}]}, {"string"}),
        ({"additionalProperties": {"type": "boolean"}}, {"boolean"}),
        ({"properties": {"y": {"type": "string"}}}, None),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, None),
        ({"properties": {"x": True}}, None),
        ({"properties": 5, "allOf": 5, "$ref": 5, "additionalProperties": 5}, None),
    ],
)
def test_types_are_found(schema: dict[str, Any], types: set[str] | None) -> None:
    definitions = {"n": {"type": "number"}, "p": {"properties": {"x": {"type": "string"}}}}
    assert argument_types({"$defs": definitions, **schema}, "x") == types


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_schemas_that_refer_to_themselves_take_little_time(keyword: str) -> None:
    again = {keyword: [{"$ref": "#/$defs/a"}] * 30}
    nested: dict[str, Any] = {}
    for _ in range(900):
        nested = {keyword: [nested]}
    many: list[Any] = [again, nested, {keyword: [again] * 100_000}, {"enum": [*range(100_000)]}]
    began_s = time.thread_time()
    for one in many:
        argument_types({"properties": {"x": one}, "$defs": {"a": again}}, "x")
        argument_types({**one, "$defs": {"a": again}}, "x")
    # A model can write many names, and each of them is looked for.
    for one in ({"enum": [*range(100_000)]}, {"type": ["null"] * 100_000}, {"$ref": "#" + "/a" * 100_000}):
        for number in range(1_000):
            argument_types({"additionalProperties": one}, f"x{number}")
    # Without a limit, one of them would take days.
    assert time.thread_time() - began_s < 2


@pytest.mark.parametrize(
    ("text", "types", "shown"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"number"}, "5"),
        ("5", {"string", "number"}, "5"),
        ("5", None, "5"),
        ("05", {"number"}, '"05"'),
        ("0x10", {"number"}, "16"),
        ("0x10", None, '"0x10"'),
        ("+49", {"string", "number"}, '"+49"'),
        ("1_000", None, '"1_000"'),
        ("null", {"string", "null"}, "null"),
        ("None", {"string", "null"}, "null"),
        ("null", {"string"}, '"null"'),
        (' "a" ', {"string", "number"}, '" \\"a\\" "'),
        ('"a"', None, '"a"'),
        ("True", None, "true"),
        ("NaN", None, '"NaN"'),
        ("{'a': [1, None]}", {"object"}, '{"a": [1, null]}'),
        (r'{"a": "b\/c", "n": 12345678901234567890.10}', None, r'{"a": "b\/c", "n": 12345678901234567890.10}'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
        ("", {"number"}, '""'),
    ],
)
def test_argument_is_written_in_json(text: str, types: set[str] | None, shown: str) -> None:
    assert json_argument(text, None if types is None else frozenset(types)) == shown

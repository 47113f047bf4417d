from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from loramux.platform.bodies.tools import Tool
from loramux.platform.grammars.check import checked_grammar
from tests.engine.byte_vocabulary import byte_vocabulary, ids

X = {"properties": {"x": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters",
    [
        X,
        {**X, "type": ["object", "null"]},
        {"anyOf": [{"type": "string"}, X]},
        {"$ref": "#/$defs/X", "$defs": {"X": X}},
        {"enum": [5, {"x": 1}, "a"]},
    ],
    ids=["untyped", "nullable", "alternatives", "reference", "enum"],
)
def test_arguments_are_objects_whatever_else_the_schema_allows(parameters: dict[str, Any]) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    grammar = checked_grammar("json_schema", json.dumps(tool.schema_of_arguments), byte_vocabulary())

    def accepts(text: str) -> bool:
        matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0)
        return matcher.consume_tokens(ids(text)) and matcher.is_accepting()

    assert accepts('{"x":1}')
    assert not any(map(accepts, ("true", "5", '"a"', "null", "[]")))

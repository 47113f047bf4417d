"""The constraint on an answer that may or must call tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.tools import MAX_TOOLS
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.chat_constraint import chat_constraint
from loramux.platform.requests.endpoint import Prepared
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.grammar import AnswerRules, OfferedTool


def offered(tokenizer: ModelTokenizer, schemas: list[dict[str, Any]], **fields: Any) -> tuple[OfferedTool, ...]:
    """Return the tools as the grammar describes them."""
    tools = [
        {"type": "function", "function": {"name": f"{index:064}", "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]
    asked = [{"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"model": "m", "messages": asked, "tools": tools, **fields})
    constraint = chat_constraint(tokenizer, body, Prepared(((1,),), None, "hermes"))
    assert constraint is not None
    calls = msgspec.json.decode(constraint.text, type=AnswerRules).calls
    assert calls is not None
    return calls.tools


def test_descriptions_do_not_count(tokenizer: ModelTokenizer) -> None:
    named = {name: {"type": "string", "description": "d" * 500} for name in ("title", "description", "$comment")}
    data = {"default": {"title": "a"}, "enum": [{"title": "a"}]}
    schema = {"type": "object", "title": "t" * 500, "properties": {**named, "x": data}, "required": ["title"]}
    found = offered(tokenizer, [schema] * 300, tool_choice="required")
    bare = {name: {"type": "string"} for name in named}
    expected = {"type": "object", "properties": {**bare, "x": data}, "required": ["title"]}
    assert [tool.schema for tool in found] == [expected] * 300
    assert schema["title"]


def test_all_tools_can_be_limited_to_one_call(tokenizer: ModelTokenizer) -> None:
    assert len(offered(tokenizer, [{"type": "object"}] * MAX_TOOLS, parallel_tool_calls=False)) == MAX_TOOLS


def test_schemas_that_are_too_long_together_are_refused(tokenizer: ModelTokenizer) -> None:
    schema = {"type": "object", "properties": {"x" * 1000: {}}}
    with pytest.raises(InvalidRequest, match="of all tools and of the response format") as caught:
        offered(tokenizer, [schema] * 150, tool_choice="required")
    assert (caught.value.code, caught.value.param) == ("grammar_too_large", "tools")

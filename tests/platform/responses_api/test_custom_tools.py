from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from loramux.platform.bodies.tools import MAX_TOOLS
from loramux.platform.errors import InvalidRequest
from loramux.platform.responses_api.custom_input import MAX_OPENING, CustomInput
from loramux.platform.responses_api.response_chat import read_response_request
from loramux.platform.responses_api.response_tools import MAX_LARK_GRAMMARS
from tests.engine.byte_vocabulary import byte_vocabulary, ids
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.test_events import SHELL
from tests.platform.responses_api.transcripts import RESPONSES
from tests.platform.storing import answers

pytestmark = pytest.mark.anyio

DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
CALL = '<tool_call>\n{"name": "shell", "arguments": %s}\n</tool_call>'


def read(arguments: str, cuts: list[int]) -> str:
    reader, pieces, start = CustomInput(), [], 0
    for end in (*cuts, len(arguments)):
        pieces.append(reader.feed(arguments[start:end]))
        start = end
    return "".join([*pieces, reader.finish()])


@pytest.mark.parametrize("text", ["", "plain", 'quotes " and \\ and \n', "é 漢 😀", "a" * 1000])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_input_is_the_same_however_the_arguments_are_cut(text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    draw = random.Random(0)
    assert read(arguments, list(range(1, len(arguments)))) == text
    for _ in range(20):
        assert read(arguments, sorted(draw.sample(range(len(arguments)), 3))) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", "{}"),
        ('{"command": "x"}', '{"command": "x"}'),
        ("x" * (MAX_OPENING + 1), "x" * (MAX_OPENING + 1)),
        ('{ "input" :\n"a"}', "a"),
        ('{"input": "cut off', "cut off"),
        ('{"input": "cut off \\u00e', "cut off "),
        ('{"input": "half \\ud83d', "half "),
        ('{"input": "half \\ud83d"}', "half \N{REPLACEMENT CHARACTER}"),
        ('{"input": "wrong \\x escape"}', "wrong \\x escape"),
    ],
)
def test_other_arguments_are_returned_as_far_as_possible(arguments: str, text: str) -> None:
    assert read(arguments, []) == text
    assert read(arguments, list(range(1, len(arguments)))) == text


@pytest.mark.parametrize(
    ("wanted", "allowed", "refused"),
    [
        (None, "any text", None),
        ({"type": "text"}, 'a "b"', None),
        (DIGITS, "42", "x"),
        ({**DIGITS, "syntax": "lark", "definition": 'start: "say " WORD\n%import common.WORD'}, "say hi", "say 1"),
    ],
)
async def test_grammar_constrains_the_input(
    tools: Gateway, wanted: dict[str, Any] | None, allowed: str, refused: str | None
) -> None:
    answers(tools, CALL % json.dumps({"input": allowed}))
    tool = SHELL if wanted is None else {**SHELL, "format": wanted}
    body = {"model": "base", "input": "Go", "tools": [tool], "tool_choice": {"type": "custom", "name": "shell"}}
    response = await tools.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    [item] = response.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "shell", allowed)
    assert response.json()["tools"] == [{**SHELL, "format": wanted or {"type": "text"}}]
    matcher = LLMatcher(byte_vocabulary(), tools.engine.adds[-1].grammar)
    assert matcher.consume_tokens(ids(CALL % json.dumps({"input": allowed})))
    if refused is not None:
        matcher.reset()
        assert not matcher.consume_tokens(ids(CALL % json.dumps({"input": refused})))
        assert wanted is not None
        prompt = prompt_of(tools)
        assert prompt.count(json.dumps(wanted["definition"])[1:-1]) == 1
        assert "pattern" not in prompt


async def test_template_shows_calls_of_custom_tools(tools: Gateway) -> None:
    answers(tools, "Done")
    given = [
        {"role": "user", "content": "Go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a.py"},
    ]
    body = {"model": "base", "input": given, "tools": [{**SHELL, "format": DIGITS}]}
    response = await tools.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    prompt = prompt_of(tools)
    assert '{"name": "shell", "arguments": {"input": "ls"}}' in prompt
    assert "Text in the form of a regular expression:\\n[0-9]+" in prompt


def tool_of(number: int, syntax: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": syntax, "definition": 'start: "a"'}
    return {"type": "custom", "name": f"tool_{number}", "format": grammar}


@pytest.mark.parametrize("in_namespaces", [False, True])
def test_number_of_grammars_and_of_tools_in_namespaces_is_limited(in_namespaces: bool) -> None:
    def read(tools: list[dict[str, Any]]) -> None:
        if in_namespaces:
            parts = (tools[:9], tools[9:])
            tools = [{"type": "namespace", "name": f"n{len(part)}", "tools": part} for part in parts]
        read_response_request({"model": "m", "input": "Hi", "tools": tools})

    read([tool_of(number, "lark") for number in range(MAX_LARK_GRAMMARS)])
    read([tool_of(number, "regex") for number in range(MAX_LARK_GRAMMARS + 1)])
    with pytest.raises(InvalidRequest, match="more than 16 tools have a Lark grammar") as refused:
        read([tool_of(number, "lark") for number in range(MAX_LARK_GRAMMARS + 1)])
    assert refused.value.param == "tools"


def test_tools_in_namespaces_count_together() -> None:
    tools = [tool_of(number, "regex") for number in range(MAX_TOOLS)]
    namespace = {"type": "namespace", "name": "n", "tools": tools}
    read_response_request({"model": "m", "input": "Hi", "tools": [namespace]})
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOOLS} items"):
        read_response_request({"model": "m", "input": "Hi", "tools": [namespace, tool_of(0, "regex")]})

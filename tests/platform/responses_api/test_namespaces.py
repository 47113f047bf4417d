from __future__ import annotations

from typing import Any

import pytest

from loramux.platform.errors import InvalidRequest
from loramux.platform.responses_api import response_tools
from loramux.platform.responses_api.response_chat import chat_of, read_response_request
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.test_events import SHELL, WEATHER
from tests.platform.responses_api.transcripts import RESPONSES
from tests.platform.storing import answers

pytestmark = pytest.mark.anyio

FORECAST: dict[str, Any] = {
    "type": "namespace",
    "name": "forecast",
    "description": "Tools about tomorrow.",
    "tools": [WEATHER, {**SHELL, "name": "ask"}],
}
CALLS = """\
<tool_call>
{"name": "forecast__get_weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "forecast__ask", "arguments": {"input": "Rain?"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {}}
</tool_call>"""


async def test_calls_of_a_namespace_keep_both_names(tools: Gateway) -> None:
    answers(tools, CALLS)
    body = {"model": "base", "input": "Hi", "tools": [FORECAST, WEATHER]}
    response = await tools.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    output = response.json()["output"]
    named = [(item["type"], item.get("namespace"), item["name"]) for item in output]
    assert named == [
        ("function_call", "forecast", "get_weather"),
        ("custom_tool_call", "forecast", "ask"),
        ("function_call", None, "get_weather"),
    ]
    assert '"description": "Tools about tomorrow.\\n\\nNow."' in prompt_of(tools)
    shown = response.json()["tools"][0]
    assert shown["tools"][0] == {**WEATHER, "strict": False}
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in output]
    answers(tools, "Done")
    again = await tools.http.post(RESPONSES, json={**body, "input": [*output, *results]})
    assert again.status_code == 200, again.text
    assert '"name": "forecast__ask", "arguments": {"input": "Rain?"}' in prompt_of(tools)


@pytest.mark.parametrize(
    ("tool", "code", "param"),
    [
        ({**FORECAST, "tools": []}, "invalid_value", "tools[1].tools"),
        ({**FORECAST, "tools": [{"type": "web_search"}]}, "invalid_value", "tools[1].tools[0]"),
        ({**FORECAST, "name": "x" * 65}, "invalid_value", "tools[1].name"),
        ({**FORECAST, "tools": [WEATHER, WEATHER]}, "invalid_value", "tools"),
        (
            {**FORECAST, "tools": [{**WEATHER, "strict": True, "parameters": {"type": "object", "oneOf": 5}}]},
            "grammar_refused",
            "tools[1].tools[0].parameters",
        ),
    ],
)
async def test_bad_namespace_names_its_field(tools: Gateway, tool: dict[str, Any], code: str, param: str) -> None:
    body = {"model": "base", "input": "Hi", "tools": [WEATHER, tool]}
    await refused(tools, RESPONSES, 400, code, param, json=body)


def test_names_that_are_equal_when_joined_are_shown() -> None:
    tools = [{"type": "namespace", "name": "a", "tools": [{**WEATHER, "name": "b"}]}, {**WEATHER, "name": "a__b"}]
    with pytest.raises(InvalidRequest, match="two tools with the name a__b"):
        read_response_request({"model": "base", "input": "Hi", "tools": tools})


async def test_names_of_a_namespace_and_its_tools_can_each_be_long(tools: Gateway) -> None:
    namespace, name = "n" * 64, "t" * 64
    answers(tools, f'<tool_call>\n{{"name": "{namespace}__{name}", "arguments": {{}}}}\n</tool_call>')
    offered = {"type": "namespace", "name": namespace, "tools": [{**WEATHER, "name": name}]}
    response = await tools.http.post(RESPONSES, json={"model": "base", "input": "Hi", "tools": [offered]})
    assert response.status_code == 200, response.text
    [item] = response.json()["output"]
    assert (item["namespace"], item["name"]) == (namespace, name)
    body = {
        "model": "base",
        "input": [item, {"type": "function_call_output", "call_id": item["call_id"], "output": ""}],
    }
    again = await tools.http.post(RESPONSES, json={**body, "tools": [offered]})
    assert again.status_code == 200, again.text


NEWS: dict[str, Any] = {"type": "namespace", "name": "news", "tools": [WEATHER, {**WEATHER, "name": "search"}]}


@pytest.mark.parametrize(
    ("named", "called"),
    [
        ({"name": "forecast__ask"}, "forecast__ask"),
        ({"name": "forecast.ask"}, "forecast__ask"),
        ({"name": "ask", "namespace": "forecast"}, "forecast__ask"),
        ({"name": "ask"}, "forecast__ask"),
        ({"name": "search", "namespace": None}, "news__search"),
        ({"name": "news.get_weather"}, "news__get_weather"),
        ({"name": "get_weather", "namespace": "forecast"}, "forecast__get_weather"),
    ],
)
def test_tool_choice_names_a_tool_as_clients_know_it(named: dict[str, Any], called: str) -> None:
    choice = {"type": "function", **named}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    for value in (choice, allowed):
        assert chosen([FORECAST, NEWS], value) == {called}


def chosen(tools: list[dict[str, Any]], choice: dict[str, Any]) -> frozenset[str] | None:
    body = chat_of(read_response_request({"model": "base", "input": "Hi", "tools": tools, "tool_choice": choice}))
    body.check()
    return body.choice_of_tools.names


def test_a_tool_without_a_namespace_has_its_own_name() -> None:
    assert chosen([FORECAST, NEWS, WEATHER], {"type": "function", "name": "get_weather"}) == {"get_weather"}


@pytest.mark.parametrize(
    "named",
    [
        {"name": "get_weather"},
        {"name": "news.ask"},
        {"name": "ask", "namespace": "news"},
        {"name": "news"},
        {"name": "."},
        {"name": "ask", "namespace": 5},
        {"name": "ask", "more": 1},
    ],
    ids=["several", "other-namespace", "wrong-namespace", "namespace-alone", "dot", "number", "unknown-field"],
)
def test_tool_choice_that_names_no_single_tool_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen([FORECAST, NEWS], {"type": "function", **named})
    assert caught.value.param == "tool_choice"


def namespace(name: str, num_tools: int) -> dict[str, Any]:
    tools = [{**WEATHER, "name": f"tool_{number}"} for number in range(num_tools)]
    return {"type": "namespace", "name": name, "tools": tools}


def test_namespaces_can_have_the_tools_of_several_servers() -> None:
    def offered(count: int) -> int:
        tools = [namespace(name, count) for name in ("one", "two")]
        return len(chat_of(read_response_request({"model": "base", "input": "Hi", "tools": tools})).offered_tools)

    assert offered(512) == 1024
    with pytest.raises(InvalidRequest, match="at most 1024 items") as caught:
        offered(513)
    assert caught.value.param == "tools"


def test_tools_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [namespace(f"n{number}", 200) for number in range(10)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "tool_1"}] * 1024}
    monkeypatch.delattr(response_tools.OfferedTool, "called_name")
    with pytest.raises(InvalidRequest, match="at most 1024 items"):
        read_response_request({"model": "base", "input": "Hi", "tools": tools, "tool_choice": allowed})


def test_time_of_a_tool_choice_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count how often the names of tools are joined."""
    num_joined = 0
    join = response_tools.joined_name

    def counted(namespace: str | None, name: str) -> str:
        nonlocal num_joined
        num_joined += 1
        return join(namespace, name)

    monkeypatch.setattr(response_tools, "joined_name", counted)
    listed = [{"type": "function", "name": f"n.tool_{number}"} for number in range(1000)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    assert len(chosen([namespace("n", 1000)], allowed) or ()) == 1000
    assert num_joined <= 10_000

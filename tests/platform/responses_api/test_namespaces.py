from __future__ import annotations

from typing import Any

import pytest

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
        ({**FORECAST, "name": "x" * 60}, "invalid_value", "tools[1].tools[0].name"),
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

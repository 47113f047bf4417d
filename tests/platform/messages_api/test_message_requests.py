from __future__ import annotations

import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.messages_api.client_tools import CLIENT_TOOLS
from loramux.platform.messages_api.message_request import CountTokensRequest, MessagesChat, MessagesRequest
from loramux.platform.messages_api.signatures import sign
from tests.platform.messages_api.message_calls import ASKED, WEATHER

CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rom€", "n": 10**30}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "hot"}


def chat(**fields: Any) -> MessagesChat:
    body = {"model": "base", "max_tokens": 200, "messages": ASKED, **fields}
    return validated({name: value for name, value in body.items() if value is not ...}, MessagesRequest).chat()


def of(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if len(content) == 1 and isinstance(content[0], str) else [*content]}


def reminder(value: str) -> str:
    return f"<system-reminder>\n{value}\n</system-reminder>"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def edits(**edit: Any) -> dict[str, Any]:
    return {"edits": [edit]}


def clearing(num_turns: int | None) -> dict[str, Any]:
    """Keep the thinking of the last turns. The default is one turn."""
    keep = {} if num_turns is None else {"keep": {"type": "thinking_turns", "value": num_turns}}
    return edits(type="clear_thinking_20251015", **keep)


def test_every_field_reaches_the_chat_request() -> None:
    made = chat(
        system=[text("One."), text("Two.")],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["a", "b"],
        stream=True,
        metadata={"user_id": "u"},
        tools=[{**WEATHER, "strict": True, "type": "custom"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 100},
        output_config={"effort": "max"},
    )
    assert made.messages[0].content == ("One.", "Two.")
    sampling = made.sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (made.text_rules().stops, made.stream, made.user, made.token_limit) == (("a", "b"), True, "u", 200)
    [tool] = made.offered_tools
    assert (tool.name, tool.function.strict, tool.schema_of_arguments) == ("get_weather", True, WEATHER["input_schema"])
    assert (made.choice_of_tools.mode, made.parallel_tool_calls) == ("required", False)
    assert (made.max_thinking_tokens, made.reasoning_effort, made.include_reasoning) == (100, "max", True)
    assert made.thinks


@pytest.mark.parametrize(
    "neutral",
    [
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"system": [{**text("S"), "cache_control": {"type": "ephemeral"}}]},
        {"messages": [of("user", {**text("Hi"), "cache_control": {"type": "ephemeral"}, "citations": None})]},
        {"tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]},
        {"tools": [{**WEATHER, "defer_loading": False, "input_examples": [], "allowed_callers": ["direct"]}]},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
        {"context_management": {}},
        {"diagnostics": {"previous_message_id": "msg_1"}},
        {"diagnostics": {"previous_message_id": None}},
        {"service_tier": "auto", "inference_geo": None, "container": None, "speed": "standard", "mcp_servers": []},
        {"metadata": {}, "system": None, "stop_sequences": [], "tools": []},
    ],
    ids=lambda neutral: " ".join(neutral),
)
def test_fields_without_effect_are_accepted(neutral: dict[str, Any]) -> None:
    chat(**neutral)


def test_turns_become_chat_messages() -> None:
    made = chat(
        messages=[
            of("system", "Be quick."),
            of("user", "One."),
            of("user", text("Two."), text("Three.")),
            of("assistant", {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")}, text("Look.")),
            of("assistant", CALL, {**CALL, "id": "toolu_2", "input": {}}),
            of("system", "Be careful."),
            of("user", {**RESULT, "tool_use_id": "toolu_2", "is_error": True, "content": None}),
            of("user", RESULT, text("And?")),
            of("system", "Be brief."),
        ],
        system="Be kind.",
    )
    shown = [
        (one.role, one.content, one.reasoning_content, one.tool_call_id, [call.id for call in one.tool_calls or ()])
        for one in made.messages
    ]
    assert shown == [
        ("system", ("Be kind.", "Be quick."), None, None, []),
        ("user", ("One.", "Two.", "Three."), None, None, []),
        ("assistant", "Look.", "Hm.", None, ["toolu_1", "toolu_2"]),
        ("tool", "Error", None, "toolu_2", []),
        ("tool", "hot", None, "toolu_1", []),
        ("user", (reminder("Be careful."), "And?", reminder("Be brief.")), None, None, []),
    ]
    calls = made.messages[2].tool_calls or ()
    assert calls[0].function.arguments == '{"city": "Rom€", "n": 1000000000000000000000000000000}'


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"max_tokens": ...}, "max_tokens", "is required"),
        ({"messages": ...}, "messages", "is required"),
        ({"model": ...}, "model", "is required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [of("system", "Hi")]}, "messages", "message of the user"),
        ({"messages": [of("system", "Hi"), of("user", RESULT)]}, "messages[1].content[0].tool_use_id", "must answer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"temperature": 1.1}, "temperature", "less than or equal to 1"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -1}, "top_k", "greater than or equal to 0"),
        ({"stop_sequences": [""]}, "stop_sequences", "characters"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
        ({"n": 2}, "n", "is not a parameter"),
        ({"container": "c"}, "container", "is not supported"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "is not supported"),
        ({"context_management": edits(type="x")}, "context_management.edits[0].type", "'clear_thinking_20251015'"),
        ({"context_management": clearing(0)}, "context_management.edits[0].keep.value", "greater than or equal to 1"),
        ({"speed": "fast"}, "speed", "is not supported"),
        ({"thinking": {"type": "between_tools"}}, "thinking", "between_tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "max_tokens", "greater than thinking.budget_tokens"),
        ({"metadata": {"user": "u"}}, "metadata.user", "is not a parameter"),
        ({"messages": [of("user", {"type": "image", "source": {}})]}, "messages[0].content[0]", "image blocks are not"),
        ({"messages": [of("user", {"type": "document"})]}, "messages[0].content[0]", "document blocks are not"),
        ({"messages": [of("user", {"type": "x" * 999})]}, "messages[0].content[0]", "x" * 64 + " blocks are not"),
        ({"messages": [of("user", {"text": "Hi"})]}, "messages[0].content[0]", "discriminator 'type'"),
        ({"messages": [of("user", {"type": "text"})]}, "messages[0].content[0].text", "is required"),
        ({"messages": [of("user", {"type": "text", "text": 5})]}, "messages[0].content[0].text", "valid string"),
        ({"messages": [of("user", "Hi", 5)]}, "messages[0].content[0]", "valid dictionary"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "valid list"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role", "'user', 'assistant' or 'system'"),
        ({"messages": [of("assistant", RESULT)]}, "messages[0].content[0]", "only user messages"),
        ({"messages": [of("user", CALL)]}, "messages[0].content[0]", "only assistant messages"),
        ({"messages": [*ASKED, of("assistant", CALL)]}, "messages[1].content[0]", "missing for toolu_1"),
        ({"messages": [*ASKED, of("assistant", CALL), *ASKED]}, "messages[2].content[0]", "missing for toolu_1"),
        ({"messages": [of("user", RESULT)]}, "messages[0].content[0].tool_use_id", "must answer"),
        (
            {"messages": [of("assistant", CALL), of("user", RESULT, RESULT)]},
            "messages[1].content[1].tool_use_id",
            "must",
        ),
        ({"messages": [of("assistant", CALL), of("user", text("x"), RESULT)]}, "messages[1].content[1]", "come before"),
        ({"messages": [of("assistant", CALL, CALL)]}, "messages[0].content[1].id", "unique"),
        (
            {"messages": [of("assistant", {"type": "thinking", "thinking": "Hm!", "signature": sign("Hm.")})]},
            "messages[0].content[0].signature",
            "invalid signature",
        ),
        (
            {"messages": [of("assistant", {"type": "redacted_thinking", "data": "x"})]},
            "messages[0].content[0].data",
            "returns no such blocks",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "web_search_20250305 is not"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0]", "computer_20250124 is not supp"),
        ({"tools": [{"type": "bash_20250124", "name": "shell"}]}, "tools[0]", "must be bash"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name", "is required"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "is required"),
        ({"tools": [{"type": "memory_20250818", "name": "memory", "x": 1}]}, "tools[0].x", "is not a parameter"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "string"}}]}, "tools[0].input_schema", '"object"'),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading", "is not"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "tool_choice", "not in tools"),
        ({"tool_choice": "auto"}, "tool_choice", "dictionary"),
        (
            {"messages": [*ASKED, of("assistant", "It")], "thinking": {"type": "adaptive"}},
            "messages",
            "cannot start with thinking",
        ),
        ({"system": [{"type": "image"}]}, "system[0]", "image blocks are not"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "is required"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_named(change: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        chat(**change)
    assert caught.value.param == param


@pytest.mark.parametrize(("num_turns", "kept"), [(1, "CD"), (2, "BCD"), (3, "ABCD"), (9, "ABCD"), (None, "CD")])
def test_thinking_is_kept_of_as_many_turns_as_the_client_asks_for(num_turns: int | None, kept: str) -> None:
    def thought(value: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": value, "signature": sign(value)}

    made = chat(
        messages=[
            of("user", "One."),
            of("assistant", thought("A"), text("First.")),
            of("user", "Two."),
            of("assistant", thought("B"), text("Second.")),
            of("user", "Three."),
            # The calls, their results and the answer are one turn, although the client adds a reminder.
            of("assistant", thought("C"), CALL),
            of("user", RESULT, text("Be brief.")),
            of("assistant", thought("D"), text("Third.")),
            of("user", "Four."),
            of("assistant", "No thinking."),
            of("user", "Five."),
        ],
        context_management=clearing(num_turns),
    )
    assert "".join(one.reasoning_content or "" for one in made.messages) == kept
    assert [one.content for one in made.messages if one.role == "assistant"] == [
        *("First.", "Second.", None, "Third.", "No thinking."),
    ]


def test_many_unanswered_calls_give_a_short_error() -> None:
    calls = [{**CALL, "id": f"call-{number}"} for number in range(5000)]
    with pytest.raises(InvalidRequest, match="call-7 and 4992 more") as caught:
        chat(messages=[of("assistant", *calls)])
    assert len(str(caught.value)) < 300


def test_a_count_needs_no_limit_and_refuses_sampling() -> None:
    assert validated({"model": "base", "messages": ASKED}, CountTokensRequest).chat().token_limit is None
    with pytest.raises(InvalidRequest, match="temperature is not a parameter"):
        validated({"model": "base", "messages": ASKED, "temperature": 1}, CountTokensRequest)


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_tools_that_the_client_runs_are_described_to_the_model(kind: str) -> None:
    known = CLIENT_TOOLS[kind]
    made = chat(tools=[WEATHER, {"type": kind, "name": known.name, "cache_control": {"type": "ephemeral"}}])
    _, tool = made.offered_tools
    assert tool.model_dump(exclude_none=True)["function"] == {
        "name": known.name,
        "description": known.description,
        "parameters": known.input_schema,
    }
    Draft202012Validator.check_schema(tool.schema_of_arguments)
    assert "command" in tool.schema_of_arguments["properties"]


def test_names_of_128_characters_are_tools() -> None:
    name = "mcp__" + "x" * 123
    made = chat(tools=[{**WEATHER, "name": name}], tool_choice={"type": "tool", "name": name})
    assert made.choice_of_tools.names == {name}


def test_agents_can_offer_the_tools_of_several_servers() -> None:
    tools = [{**WEATHER, "name": f"mcp__{number}"} for number in range(1025)]
    assert len(chat(tools=tools[:-1]).offered_tools) == 1024
    with pytest.raises(InvalidRequest, match="at most 1024 items") as caught:
        chat(tools=tools)
    assert caught.value.param == "tools"

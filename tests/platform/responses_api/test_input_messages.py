from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.content_form import ContentForms
from loramux.engine.chat_templates.messages import template_messages
from loramux.platform.bodies.conversation import ChatMessage, rendered_fields
from loramux.platform.errors import ApiError
from loramux.platform.responses_api.reasoning_text import opened, sealed
from loramux.platform.responses_api.response_chat import chat_of, read_response_request
from loramux.platform.responses_api.response_input import read_line

USER = {"role": "user", "content": "Hi"}
PART = {"type": "input_text", "text": "Part"}
PARTS: Any = [{"type": "text", "text": one} for one in "BC"]
REMINDER = "<system-reminder>\nB\n</system-reminder>"
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "out"}
OTHER_OUTPUT = {**OUTPUT, "call_id": "c2"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def conversation(given: Any, **fields: Any) -> list[dict[str, Any]]:
    body = chat_of(read_response_request({"model": "base", "input": given, **fields}))
    body.check()
    return [message.model_dump(exclude_none=True) for message in body.messages]


def assistant(content: str | tuple[str, ...] | None = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **({} if content is None else {"content": content}), **fields}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        pytest.param("Hi", [USER], id="string"),
        pytest.param([USER], [USER], id="message-without-type"),
        pytest.param(
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], [USER], id="part"
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "input_text", "text": one} for one in "ab"]}],
            [{"role": "user", "content": ("a", "b")}],
            id="parts",
        ),
        pytest.param(
            [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER],
            [{"role": "system", "content": "A\n\nB"}, USER],
            id="leading-system-messages-become-one",
        ),
        pytest.param(
            [USER, {"role": "developer", "content": "B"}],
            [{"role": "user", "content": f"Hi\n\n{REMINDER}"}],
            id="later-system",
        ),
        pytest.param(
            [
                USER,
                {"role": "system", "content": ""},
                {"role": "user", "content": ""},
                {"role": "developer", "content": [{**PART, "text": one} for one in ("B", "", "B")]},
            ],
            [{"role": "user", "content": f"Hi\n\n{REMINDER}\n\n{REMINDER}"}],
            id="empty-texts",
        ),
        pytest.param(
            [USER, {"role": "developer", "content": "B"}, {"role": "user", "content": [PART, PART]}],
            [{"role": "user", "content": (f"Hi\n\n{REMINDER}\n\nPart", "Part")}],
            id="turn-of-the-user",
        ),
        pytest.param(
            [USER, CALL, OUTPUT, {"role": "system", "content": "B"}, USER, {"role": "assistant", "content": "A"}, USER],
            [
                USER,
                assistant(None, tool_calls=[CHAT_CALL]),
                {"role": "tool", "tool_call_id": "c1", "content": "out"},
                {"role": "user", "content": f"{REMINDER}\n\nHi"},
                assistant("A"),
                USER,
            ],
            id="system-message-after-an-output",
        ),
        pytest.param(
            [USER, CALL, {**CALL, "call_id": "c2"}, {"role": "developer", "content": "B"}, OUTPUT, USER, OTHER_OUTPUT],
            [
                USER,
                assistant(None, tool_calls=[CHAT_CALL, {**CHAT_CALL, "id": "c2"}]),
                {"role": "tool", "tool_call_id": "c1", "content": "out"},
                {"role": "tool", "tool_call_id": "c2", "content": "out"},
                {"role": "user", "content": f"{REMINDER}\n\nHi"},
            ],
            id="messages-between-calls-and-outputs",
        ),
        pytest.param(
            [CALL, USER, {"role": "assistant", "content": "A"}, USER, OUTPUT],
            [
                assistant(None, tool_calls=[CHAT_CALL]),
                USER,
                assistant("A"),
                USER,
                {"role": "tool", "tool_call_id": "c1", "content": "out"},
            ],
            id="output-after-an-answer",
        ),
        pytest.param([CALL, USER], [assistant(None, tool_calls=[CHAT_CALL]), USER], id="call-without-output"),
        pytest.param(
            [THOUGHT, CALL, {"role": "assistant", "content": ""}, THOUGHT, {**CALL, "call_id": "c2"}],
            [assistant("", reasoning_content="T\nT", tool_calls=[CHAT_CALL, {**CHAT_CALL, "id": "c2"}])],
            id="reasoning-before-each-call",
        ),
        pytest.param(
            [USER, {"role": "assistant", "content": "A"}, CALL, {"role": "assistant", "content": "B"}, OUTPUT],
            [
                USER,
                assistant("A\n\nB", tool_calls=[CHAT_CALL]),
                {"role": "tool", "tool_call_id": "c1", "content": "out"},
            ],
            id="text-after-a-call",
        ),
        pytest.param(
            [
                {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
            ],
            [assistant("A"), assistant("No")],
            id="answers",
        ),
        pytest.param(
            [
                THOUGHT,
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": "A"},
                {**CALL, "id": "fc_1", "status": "completed"},
                {"type": "function_call_output", "call_id": "c1", "output": "out"},
            ],
            [
                assistant("A", reasoning_content="T", tool_calls=[CHAT_CALL]),
                {"role": "tool", "tool_call_id": "c1", "content": "out"},
            ],
            id="turn-becomes-one-message",
        ),
        pytest.param(
            [
                {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": 'a"b'},
                CALL,
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call_output", "call_id": "c1", "output": "y"},
                CALL,
            ],
            [
                assistant(
                    None,
                    tool_calls=[
                        {
                            "id": "c2",
                            "type": "function",
                            "function": {"name": "shell", "arguments": '{"input": "a\\"b"}'},
                        },
                        CHAT_CALL,
                    ],
                ),
                {"role": "tool", "tool_call_id": "c2", "content": "x"},
                {"role": "tool", "tool_call_id": "c1", "content": "y"},
                assistant(None, tool_calls=[CHAT_CALL]),
            ],
            id="parallel-calls-and-custom-calls",
        ),
        pytest.param(
            [USER, {"type": "reasoning", "summary": [], "encrypted_content": sealed("Hm ö")}],
            [USER, assistant("", reasoning_content="Hm ö")],
            id="reasoning-alone-and-sealed",
        ),
        pytest.param(
            [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-vendor"}, USER],
            [USER],
            id="reasoning-of-another-server",
        ),
    ],
)
def test_items_become_messages(given: Any, messages: list[dict[str, Any]]) -> None:
    assert conversation(given) == messages


def test_instructions_come_first() -> None:
    assert conversation("Hi", instructions="Be brief") == [{"role": "system", "content": "Be brief"}, USER]
    given = [{"role": "developer", "content": "B"}, USER]
    assert conversation(given, instructions="A")[0] == {"role": "system", "content": "A\n\nB"}


STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif not loop.first and message.role == loop.previtem.role %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- message.role ~ ': ' ~ message.content ~ '\\n' }}
{%- endfor %}"""


def test_strict_template_renders_the_conversation_of_an_agent() -> None:
    given = [{"role": "developer", "content": "A"}, USER, {"role": "developer", "content": "B"}, USER]
    body = chat_of(read_response_request({"model": "base", "input": given, "instructions": "I"}))
    text = ChatTemplate({"default": STRICT}, {}).render(
        template_messages(rendered_fields(body.messages), ContentForms())
    )
    assert text == f"system: I\n\nA\nuser: Hi\n\n{REMINDER}\n\nHi\n"


NINE = """\
{%- for message in messages %}
    {%- for id in (message.tool_calls or []) | map(attribute="id") | list + [message.tool_call_id or "000000000"] %}
        {%- if id | length != 9 %}{{- raise_exception("IDs must have nine characters") }}{% endif %}
    {%- endfor %}
    {{- (message.tool_calls or [message]) | map(attribute="id") | join(",") ~ message.tool_call_id ~ ";" }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (("call_1", "x" * 64, "call_1"), "000000000;000000001;000000000"),
        (("abc123XYZ", "call_1", "abc-123-4"), "abc123XYZ;000000001;000000002"),
        (("000000001", "call_1"), "000000000;000000001"),
    ],
    ids=["other servers", "own", "numbers"],
)
def test_templates_get_ids_that_those_of_mistral_accept(ids: tuple[str, ...], shown: str) -> None:
    history = [
        item
        for call_id in ids
        for item in (
            {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call_id, "output": "x"},
        )
    ]
    body = chat_of(read_response_request({"model": "base", "input": [USER, *history]}))
    text = ChatTemplate({"default": NINE}, {}).render(template_messages(rendered_fields(body.messages), ContentForms()))
    assert text == ";" + "".join(f"{one};{one};" for one in shown.split(";"))


def test_leading_system_messages_of_a_chat_become_one() -> None:
    system = ChatMessage(role="system", content="A"), ChatMessage(role="developer", content=PARTS)
    user = ChatMessage(role="user", content="Hi")
    shown = template_messages(rendered_fields([*system, user, system[0]]), ContentForms())
    assert shown == [{"role": "system", "content": "A\n\nB\nC"}, USER, {"role": "system", "content": "A"}]
    parts = template_messages(rendered_fields([*system, user]), ContentForms(system="parts"))[0]["content"]
    assert [part["text"] for part in parts] == ["A\n\nB", "C"]


@pytest.mark.parametrize("sent", ["", "lmxr1.", "lmxr1.%%%", "lmxr1.gICA", "lmxr1.abc", "other"])
def test_forged_reasoning_is_no_text(sent: str) -> None:
    assert opened(sent) == ""


MESSAGE = {"type": "message", "role": "user"}


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ([{"type": "function_call_output", "call_id": "c1", "output": "x"}], "input[0].call_id", "invalid_value"),
        (
            [USER, {"type": "custom_tool_call_output", "call_id": "c1", "output": "x"}],
            "input[1].call_id",
            "invalid_value",
        ),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0].type", "unsupported_item"),
        ([{"type": "computer_call_output", "call_id": "c"}], "input[0].type", "unsupported_item"),
        ([{"type": 5}], "input[0].type", "invalid_value"),
        ([5], "input[0]", "invalid_type"),
        ([], "input", "missing_required_parameter"),
        ({"role": "user"}, "input", "invalid_type"),
        (None, "input", "invalid_type"),
        ([{**MESSAGE, "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content", "invalid_value"),
        ([{**MESSAGE, "content": [{"type": "input_text"}]}], "input[0].content", "invalid_value"),
        ([{**MESSAGE, "content": [{"type": "input_text", "text": "x", "y": 1}]}], "input[0].content", "invalid_value"),
        ([{**MESSAGE, "content": None}], "input[0].content", "invalid_type"),
        ([{**MESSAGE}], "input[0].content", "missing_required_parameter"),
        ([{"role": "owner", "content": "x"}], "input[0].role", "invalid_value"),
        ([{**USER, "more": 1}], "input[0].more", "unknown_parameter"),
        ([{**CALL, "call_id": ""}], "input[0].call_id", "invalid_value"),
        ([{**CALL, "name": "a\nb"}], "input[0].name", "invalid_value"),
        ([{**CALL, "arguments": {}}], "input[0].arguments", "invalid_type"),
    ],
)
def test_bad_items_are_named(given: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        conversation(given)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_unsupported_content_is_named() -> None:
    for kind in ("input_image", "input_file", "input_audio"):
        with pytest.raises(ApiError, match=kind):
            conversation([{**MESSAGE, "content": [{"type": kind}]}])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1].id"),
    ],
)
def test_line_of_a_batch_names_no_stored_objects(change: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_line({"model": "base", "input": "Hi", **change})
    assert caught.value.param == param

"""Renders fixed conversations with a template, to decide whether it is usable and to find out what it supports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loramux.platform.tokenizer.conversation import Conversation, TemplateRefused

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names that templates use for the variable that turns thinking on and off."""

_SYSTEM = {"role": "system", "content": "Guidance 5081."}
_USER = {"role": "user", "content": "Question 2749?"}
_ANSWER = {"role": "assistant", "content": "Answer 6310."}
_AGAIN = {"role": "user", "content": "Question 9174?"}
_NAME = "look_up_3852"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_ARGUMENTS = {"word": "fox"}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": _NAME, "content": "Result 1496."}


class TemplateFeatures(msgspec.Struct, frozen=True, kw_only=True):
    system: bool
    """True if system messages appear in the prompt."""
    several_turns: bool
    """True if earlier turns, by the user and by the assistant, appear in the prompt."""
    tools: bool
    """True if tools appear in the prompt."""
    tool_results: bool
    """True if calls and their results appear in the prompt."""
    arguments_as_text: bool
    """True if calls appear only if their arguments are JSON text, as in the OpenAI API. Most templates read objects."""
    thinking_switch: str | None
    """The variable that turns thinking on and off, one of THINKING_SWITCHES, if there is one."""
    reasoning_effort: bool
    """True if the variable `reasoning_effort` changes the prompt."""


def check_template(render: Callable[[Conversation], str]) -> TemplateFeatures:
    """Return the features of the template that `render` uses.

    Raises TemplateRefused if a plain conversation is not rendered. `render` must raise TemplateRefused for a
    conversation that the template rejects.
    """

    def prompt(*messages: Mapping[str, Any], tools: bool = False, **kwargs: Any) -> str:
        return render(Conversation(messages=messages, tools=[_TOOL] if tools else None, kwargs=kwargs))

    def shows(expected: list[str], *messages: Mapping[str, Any], tools: bool = False) -> bool:
        try:
            text = prompt(*messages, tools=tools)
        except TemplateRefused:
            return False
        return all(part in text for part in expected)

    def changes(name: str, values: tuple[Any, ...]) -> bool:
        try:
            return len({prompt(_USER, **{name: value}) for value in values}) > 1
        except TemplateRefused:
            return False

    def shows_call(arguments: Any) -> bool:
        return shows([_NAME, "fox", _RESULT["content"]], _USER, _called(arguments), _RESULT, tools=True)

    plain = prompt(_USER)
    if not plain.strip():
        raise TemplateRefused("the chat template renders nothing", "chat_template")
    if _USER["content"] not in plain:
        raise TemplateRefused("the chat template does not render the user's message", "chat_template")
    reads_objects = shows_call(_ARGUMENTS)
    reads_text = not reads_objects and shows_call(json.dumps(_ARGUMENTS))
    return TemplateFeatures(
        system=shows([_SYSTEM["content"], _USER["content"]], _SYSTEM, _USER),
        several_turns=shows([one["content"] for one in (_USER, _ANSWER, _AGAIN)], _USER, _ANSWER, _AGAIN),
        tools=shows([_NAME], _USER, tools=True),
        tool_results=reads_objects or reads_text,
        arguments_as_text=reads_text,
        thinking_switch=next((one for one in THINKING_SWITCHES if changes(one, (True, False))), None),
        reasoning_effort=changes("reasoning_effort", ("low", "high")),
    )


def _called(arguments: Any) -> dict[str, Any]:
    # Mistral templates require an ID of nine characters.
    call = {"id": _RESULT["tool_call_id"], "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}

"""Renders fixed conversations with a template, to decide whether it is usable and to find out what it supports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loramux.engine.chat_templates.content_form import ContentForm, ContentForms, formed_content
from loramux.engine.chat_templates.conversation import Conversation
from loramux.engine.chat_templates.reasoning_effort import ReasoningEffort, known_efforts
from loramux.engine.chat_templates.template_refused import TemplateRefused

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
_MORE = "Detail 7538."
_UNREAD = "unread_4417"
"""A key of content parts that no template reads. It appears in prompts of templates that print whole parts."""


class TemplateFeatures(msgspec.Struct, frozen=True, kw_only=True):
    tools: bool
    """True if tools appear in the prompt."""
    arguments_as_text: bool
    """True if calls appear only if their arguments are JSON text, as in the OpenAI API. Most templates read objects."""
    thinking_switch: str | None
    """The variable that turns thinking on and off, one of THINKING_SWITCHES, if there is one."""
    reasoning_efforts: tuple[ReasoningEffort, ...]
    """The values of the variable `reasoning_effort` that the template can get, if they change the prompt."""
    is_off_by_default: bool
    """True if the template turns thinking off unless it gets an effort."""
    content: ContentForms
    """The form in which each role's content appears in the prompt."""


def check_template(render: Callable[[Conversation], str], source: str) -> TemplateFeatures:
    """Return the features of the template that `render` uses for conversations without tools.

    Raises TemplateRefused if a plain conversation is not rendered. `render` must raise TemplateRefused for a
    conversation that the template rejects.
    """

    def prompt(*messages: Mapping[str, Any], tools: bool = False, **kwargs: Any) -> str:
        return render(Conversation(messages=messages, tools=[_TOOL] if tools else None, kwargs=kwargs))

    def shows(expected: Sequence[str], *messages: Mapping[str, Any], tools: bool = False) -> bool:
        try:
            text = prompt(*messages, tools=tools)
        except TemplateRefused:
            return False
        return all(part in text for part in expected) and _UNREAD not in text

    def form(
        message: Mapping[str, Any],
        before: Sequence[Mapping[str, Any]] = (),
        after: Sequence[Mapping[str, Any]] = (),
        tools: bool = False,
    ) -> ContentForm | None:
        """Return the form in which the message's content is shown, or None if it is shown in no form."""

        def reads(content: Any, *expected: str) -> bool:
            return shows(expected, *before, {**message, "content": content}, *after, tools=tools)

        text = message["content"]
        reads_text = reads(text, text)
        if reads(_parts(text, _MORE), text, _MORE):
            return "as_sent" if reads_text else "parts"
        if reads_text:
            return "text"
        return "one_part" if reads(_parts(text), text) else None

    def with_effort(effort: str | None) -> str | None:
        kwargs: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        try:
            return prompt(user, **kwargs)
        except TemplateRefused:
            return None

    def changes(name: str, message: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
        try:
            return len({prompt(message, **{name: value}) for value in values}) > 1
        except TemplateRefused:
            return False

    user_form = form(_USER)
    if user_form is None:
        if not prompt(_USER).strip():
            raise TemplateRefused("the chat template renders nothing", "chat_template")
        raise TemplateRefused("the chat template does not render the user's message", "chat_template")
    user, again = _formed(_USER, user_form), _formed(_AGAIN, user_form)
    # A role that is not shown gets the user's form.
    system_form = form(_SYSTEM, after=[user]) or user_form
    assistant_form = form(_ANSWER, before=[user], after=[again]) or user_form

    def called(arguments: Any) -> dict[str, Any]:
        # Mistral templates require an ID of nine characters.
        call = {"id": _RESULT["tool_call_id"], "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        return _formed({"role": "assistant", "content": "", "tool_calls": [call]}, assistant_form)

    objects, text = called(_ARGUMENTS), called(json.dumps(_ARGUMENTS))
    tool_form = (
        form(_RESULT, before=[user, objects], tools=True) or form(_RESULT, before=[user, text], tools=True) or user_form
    )

    def shows_call(call: Mapping[str, Any]) -> bool:
        return shows([_NAME, "fox", _RESULT["content"]], user, call, _formed(_RESULT, tool_form), tools=True)

    reads_text = not shows_call(objects) and shows_call(text)
    # Most templates do not read the variable. Rendering with each effort would take much of a check's time.
    efforts, is_off = known_efforts(with_effort) if "reasoning_effort" in source else ((), False)
    return TemplateFeatures(
        tools=shows([_NAME], user, tools=True),
        arguments_as_text=reads_text,
        thinking_switch=next((one for one in THINKING_SWITCHES if changes(one, user, (True, False))), None),
        reasoning_efforts=efforts,
        is_off_by_default=is_off,
        content=ContentForms(system=system_form, user=user_form, assistant=assistant_form, tool=tool_form),
    )


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, _UNREAD: True} for text in texts]


def _formed(message: Mapping[str, Any], form: ContentForm) -> dict[str, Any]:
    return {**message, "content": formed_content(form, message["content"])}

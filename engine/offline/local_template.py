"""Renders the conversations of a Python program with chat templates from files that it trusts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, get_args

import msgspec

from loramux.adapter_store.formats.version_files.tokenizer_files import DEFAULT
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.conversation import reason
from loramux.engine.chat_templates.messages import IGNORED_FIELDS, Message, Role, template_arguments
from loramux.engine.chat_templates.template_check import TemplateFeatures
from loramux.engine.chat_templates.template_refused import TemplateRefused

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""The messages of a conversation, as in OpenAI's API. Objects with the same attributes can replace the mappings."""


class OfferedFunction(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool as a template gets it from a server: without null fields, in this order."""

    function: OfferedFunction


class LocalTemplate:
    """A chat template, compiled and checked at its first use. Thread-safe.

    A server renders the templates of tenants in confined processes. Here, the template runs in this process, in the
    same sandboxed environment of Jinja.
    """

    def __init__(self, load: Callable[[], ChatTemplate]) -> None:
        self._load = load

    @cached_property
    def _loaded(self) -> tuple[ChatTemplate, TemplateFeatures | None]:
        template = self._load()
        return template, template.known_features

    def render(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return the prompt that a server renders for a request with these fields. Raises TemplateRefused, or
        ModelNotSupported if the base's files are malformed.
        """
        template, features = self._loaded
        given = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        try:
            arguments = template_arguments(given, _tools(() if tools is None else tools), features)
        except TemplateRefused as refused:
            if "[" not in refused.param or refused.param in refused.message:
                raise
            raise TemplateRefused(f"{refused.param}: {refused.message}", refused.param, refused.code) from None
        return template.render(
            **arguments,
            kwargs=kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def adapter_template(source: str, special_tokens: Mapping[str, str]) -> LocalTemplate:
    """Return an adapter's own template."""

    def load() -> ChatTemplate:
        try:
            return ChatTemplate({DEFAULT: source}, special_tokens)
        except Exception as error:  # a malformed template can raise anything
            raise TemplateRefused(f"the adapter's chat template is malformed: {reason(error)}") from error

    return LocalTemplate(load)


def listed_chats(messages: Chat | Sequence[Chat]) -> list[Chat]:
    """Return the conversations of a call. Raises ValueError."""
    if isinstance(messages, str | bytes | Mapping):
        raise ValueError('messages is a list of {"role": ..., "content": ...}; `generate` answers a plain text')
    listed: list[Any] = list(messages)
    return listed if not listed or _is_chat(listed[0]) else [listed]


def _is_chat(one: Any) -> bool:
    # A conversation can also be an array, as in a column of pandas.
    return hasattr(one, "__len__") and not isinstance(one, str | Mapping)


def _message(message: Any, place: str) -> Message:
    if isinstance(message, Mapping):
        # Data sets and the dumps of clients contain all fields, also those without a value.
        message = {
            name: value
            for name, value in message.items()
            if name == "content" or (name not in IGNORED_FIELDS and value is not None and not _is_empty_list(value))
        }
        if message.get("role") not in get_args(Role):
            raise TemplateRefused(f"{place}.role must be one of {', '.join(get_args(Role))}: {message.get('role')!r}")
    return msgspec.convert(_plain(message, Message, place, "messages"), Message)


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, list) and not value


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_plain(tool, OfferedTool, f"tools[{index}]", "tools") for index, tool in enumerate(tools)]


def _plain(value: Any, kind: Any, place: str, param: str) -> dict[str, Any]:
    """Return the fields of a `kind`, as values of JSON. Raises TemplateRefused."""
    try:
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.convert(value, kind, from_attributes=True))
        return plain
    except (msgspec.ValidationError, TypeError) as error:
        problem, _, where = str(error).partition(" - at `$")
        raise TemplateRefused(f"{place}{where.rstrip('`')}: {problem}", param) from None

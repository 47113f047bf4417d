"""A model's own chat templates, rendered in a sandbox as Hugging Face renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.files.file_names import TOKENIZER_CONFIG_FILE
from loramux.adapter_store.formats.version_files.added_vocabulary import SpecialTokens
from loramux.adapter_store.formats.version_files.tokenizer_files import (
    DEFAULT,
    TOOL_USE,
    jinja_lines,
    one_template,
    special_tokens_of,
    template_sources,
)
from loramux.engine.chat_templates.conversation import Conversation, reason, render
from loramux.engine.chat_templates.jinja_sandbox import ChatEnvironment
from loramux.engine.chat_templates.template_check import TemplateFeatures, check_template
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.protocol.errors import ModelNotSupported


class ChatTemplate:
    """Renders messages as the text of a prompt, including special tokens. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates `default` and `tool_use` of `sources`. A malformed template can raise any exception."""
        self._environment = ChatEnvironment()
        self.sources: Mapping[str, str] = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
        self._templates = {
            name: self._environment.template(self._environment.compiled(source))
            for name, source in self.sources.items()
        }
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def load(model_dir: Path) -> ChatTemplate | None:
        """Load the templates of a Hugging Face directory, or return None if it has none. Raises ModelNotSupported."""
        config = read_json(model_dir / TOKENIZER_CONFIG_FILE)
        try:
            sources = template_sources(model_dir, config)
            if DEFAULT not in sources and TOOL_USE not in sources:
                return None
            return ChatTemplate(sources, read_special_tokens(model_dir))
        except Exception as error:  # a malformed template can raise anything
            raise ModelNotSupported(f"the chat template of {model_dir} is malformed: {reason(error)}") from error

    def is_copied_by(self, source: str, special_tokens: SpecialTokens) -> bool:
        """Return whether a version's template is a copy of these templates. `special_tokens` are the version's own."""
        if DEFAULT not in self.sources or any(role in source for role, _ in special_tokens):
            return False
        return jinja_lines(source) == jinja_lines(one_template(self.sources))

    def source(self, *, has_tools: bool) -> str:
        """Return the template for a conversation with or without tools. Raises TemplateRefused if there is none."""
        return self.sources[self._name(has_tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation as a prompt. Raises TemplateRefused if it exceeds a limit or the template rejects it.

        `tools` are in OpenAI's format, or None if the request has none. `kwargs` are additional variables for the
        template. `add_generation_prompt` appends the start of the assistant's turn. `continue_final_message` leaves the
        last message open.
        """
        conversation = Conversation(
            messages=messages,
            tools=tools,
            kwargs=kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._render(conversation)

    def features(self) -> TemplateFeatures:
        """Return the features that the templates support. Raises TemplateRefused if they do not render a plain
        conversation.
        """
        return check_template(self._render, self.sources.get(DEFAULT, ""))

    @cached_property
    def known_features(self) -> TemplateFeatures | None:
        """The features, or None if the templates do not render a plain conversation.

        Such templates may render others. If not, each rendering fails with the reason.
        """
        try:
            return self.features()
        except TemplateRefused:
            return None

    def _render(self, conversation: Conversation) -> str:
        name = self._name(conversation.tools is not None)
        return render(self._environment, self._templates[name], self.sources[name], self._special_tokens, conversation)

    def _name(self, has_tools: bool) -> str:
        if has_tools and TOOL_USE in self._templates:
            return TOOL_USE
        if DEFAULT not in self._templates:
            raise TemplateRefused("this model has a chat template only for requests with tools", "tools")
        return DEFAULT


def read_special_tokens(model_dir: Path) -> dict[str, str]:
    names = read_json(model_dir / "special_tokens_map.json") | read_json(model_dir / TOKENIZER_CONFIG_FILE)
    return special_tokens_of(names)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file, or return an empty object if there is no file. Raises ModelNotSupported."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotSupported(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelNotSupported(f"{path} does not contain a JSON object")
    return document

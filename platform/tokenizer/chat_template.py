"""A model's own chat template, rendered in a sandbox as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loramux.platform.errors import InvalidRequest

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ModelFilesError(Exception):
    """The model directory's tokenizer files cannot be used; the message says which and why."""


class ChatTemplate:
    """Renders messages as the text of a prompt, including special tokens."""

    def __init__(self, template: Template, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def load(model_dir: Path) -> ChatTemplate | None:
        """The template of a Hugging Face directory, or None if it has none. Raises ModelFilesError."""
        config = read_json(model_dir / "tokenizer_config.json")
        source = _source(model_dir, config)
        if source is None:
            return None
        try:
            template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelFilesError(f"the chat template of {model_dir} is malformed: {error}") from error
        names = read_json(model_dir / "special_tokens_map.json") | config
        return ChatTemplate(template, {name: _text(names[name]) for name in SPECIAL_TOKENS if names.get(name)})

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to the start of the assistant's turn. Raises InvalidRequest if the template rejects it."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"the chat template rejects these messages: {error}", param="messages") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty object if there is no file. Raises ModelFilesError."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelFilesError(f"{path} does not contain a JSON object")
    return document


def _source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        # If there are several named templates, `default` is the one for plain chat.
        declared = next((item["template"] for item in declared if item.get("name") == "default"), None)
    return declared if isinstance(declared, str) else None


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

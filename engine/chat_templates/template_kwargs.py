"""Checks `chat_template_kwargs`, the additional variables that a request passes to the chat template."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loramux.adapter_store.formats.version_files.added_vocabulary import SPECIAL_TOKENS
from loramux.engine.chat_templates.template_refused import TemplateRefused

MAX_KWARGS = 32
MAX_NAME_CHARS = 64
MAX_DEPTH = 8
"""Maximum depth of nested lists and objects in one value."""
MAX_SIZE = 16 * 1024
"""Maximum total size of all entries: the characters of names and strings, plus one per value."""

_PARAM = "chat_template_kwargs"
_RESERVED = frozenset(
    (*SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateRefused unless the entries are few, small JSON values, and no name hides another variable."""
    if len(kwargs) > MAX_KWARGS:
        raise _invalid(f"has more than {MAX_KWARGS} entries")
    for name in kwargs:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isidentifier() or name.startswith("_"):
            raise _invalid(f"has a name that is not valid for a template variable: {name!r:.100}")
        if name in _RESERVED:
            raise _invalid(f"must not contain {name}")
    _check_values(kwargs)


def _check_values(kwargs: Mapping[str, Any]) -> None:
    size = 0
    waiting: list[tuple[int, Any]] = [(0, dict(kwargs))]
    while waiting:
        depth, value = waiting.pop()
        size += 1
        if isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise _invalid(f"is nested more than {MAX_DEPTH} deep")
            if isinstance(value, dict):
                if not all(isinstance(name, str) for name in value):
                    raise _invalid("has an object with a name that is not a string")
                size += sum(map(len, value))
            waiting += [(depth + 1, child) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str):
            size += len(value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _invalid("has a number that is not finite")
        elif isinstance(value, int):
            if value.bit_length() > 63:
                raise _invalid("has a number that is out of range")
        elif value is not None:
            raise _invalid("must contain only JSON values")
        if size > MAX_SIZE:
            raise _invalid(f"has more than {MAX_SIZE} characters and values")


def _invalid(message: str) -> TemplateRefused:
    return TemplateRefused(f"{_PARAM} {message}", _PARAM)

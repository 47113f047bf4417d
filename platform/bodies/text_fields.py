"""Checks of texts that several surfaces share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from loramux.platform.tool_calls.reader import MAX_NAME_LENGTH, is_function_name


def encodable(text: str) -> str:
    """Return `text`. Raises PydanticKnownError if UTF-8 cannot encode it, as with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticKnownError("string_unicode") from None
    return text


def _called_name(name: str) -> str:
    if not is_function_name(name):
        raise ValueError(f"a function's name must have 1 to {MAX_NAME_LENGTH} printable characters")
    return name


CalledName = Annotated[str, AfterValidator(_called_name)]
"""The name of a called function. A model may call functions that were not offered, so every name is accepted that our
parsers accept.
"""

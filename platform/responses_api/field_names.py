"""Names the fields of a response request in errors about the chat request that it became."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loramux.platform.errors import ApiError
from loramux.platform.responses_api.response_tools import OfferedTool

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_TOOL = re.compile(r"tools\[(\d+)\]\.function(.*)", re.DOTALL)
_SCHEMA = "response_format.json_schema"
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_IN_MESSAGES = re.compile(r"\b(?:max_completion_tokens|max_tokens|reasoning_effort|response_format)\b")
_OF_ITEMS = {".tool_call_id": ".call_id"}


def rename_fields(error: ApiError, places: Sequence[str], tools: Sequence[OfferedTool]) -> None:
    """Change the field names in an error.

    `places` are the request fields that the chat messages come from, and `tools` the tools of the chat request.
    """
    if error.param is not None:
        renamed = _renamed(error.param, places, tools)
        error.message = error.message.replace(error.param, renamed)
        error.param = renamed
    error.message = _IN_MESSAGES.sub(lambda found: _NAMES[found.group()], error.message)


def _renamed(param: str, places: Sequence[str], tools: Sequence[OfferedTool]) -> str:
    if param in _NAMES:
        return _NAMES[param]
    if param.startswith(_SCHEMA):
        return "text.format" + param[len(_SCHEMA) :]
    if found := _MESSAGE.fullmatch(param):
        place = places[int(found[1])]
        return place + (_OF_ITEMS.get(found[2], found[2]) if place.startswith("input[") else "")
    if found := _TOOL.fullmatch(param):
        tool, rest = tools[int(found[1])], found[2]
        return tool.place + (".format" if tool.is_custom and rest == ".parameters" else rest)
    return param

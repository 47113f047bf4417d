"""Builds the constraint on a chat answer from the tools, the reasoning markers and the body's own constraint."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from loramux.engine.constraints.constraint_grammar import DATA_KEYWORDS
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.requests.endpoint import Prepared
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.grammar import (
    AnswerRules,
    Calls,
    OfferedTool,
    OpenChannels,
    Thinking,
    added_layout,
)
from loramux.platform.tool_calls.harmony import Place

ANY_ARGUMENTS = {"type": "object"}

_NOTES = frozenset({"title", "description", "$comment"})
"""Keywords that a grammar does not read. They are most of the bytes of many schemas."""


def chat_constraint(tokenizer: ModelTokenizer, body: ChatRequest, prepared: Prepared) -> Constraint | None:
    wanted, reasoning = body.constraint(), prepared.reasoning
    calls = _calls(body, prepared.tool_format, is_constrained=wanted is not None)
    channels = prepared.channels
    if calls is None and (wanted is None or (reasoning is None and channels is None)):
        return wanted
    if calls is not None and calls.is_forced:
        # A forced answer consists only of calls, so the other constraint does not apply.
        wanted = None
    ids = {token: token_id for one in prepared.markers for token, token_id in tokenizer.marker_ids(one).items()}
    if channels is not None:
        ids |= channels.format.ids
    rules = AnswerRules(
        thinking=None
        if reasoning is None or channels is not None
        else Thinking(reasoning.markers.begin, reasoning.markers.end, reasoning.is_open),
        channels=None if channels is None else _open_channels(channels.place),
        calls=calls,
        grammar=None if wanted is None else (wanted.kind, wanted.text),
        special_tokens=ids,
    )
    param = "tools" if wanted is None else wanted.param
    return Constraint.of_text("answer", msgspec.json.encode(rules).decode(), param)


def _open_channels(place: Place) -> OpenChannels:
    channel = None if place.message is None else place.message.channel
    return OpenChannels(has_start=channel is None and bool(place.role), channel=channel)


def _calls(body: ChatRequest, tool_format: str | None, *, is_constrained: bool) -> Calls | None:
    """Return the calls that the answer's grammar must describe, or None if calls need no grammar."""
    tools, choice = body.offered_tools, body.choice_of_tools
    has_strict = any(tool.function.strict for tool in tools)
    is_parallel = body.parallel_tool_calls is not False
    is_limited = choice.is_forced or choice.names is not None
    if not tools or not (is_limited or has_strict or is_constrained or not is_parallel):
        return None
    if tool_format is None:
        if is_limited or has_strict:
            raise InvalidRequest(
                "this model's tool calls are not parsed, so they cannot be constrained",
                param="tool_choice" if is_limited else "tools",
                code="unsupported_parameter",
            )
        return None
    return Calls(
        format=tool_format,
        tools=tuple(
            OfferedTool(tool.name, _without_notes(tool.schema_of_arguments), f"tools[{index}].function.parameters")
            if choice.is_forced or tool.function.strict
            else OfferedTool(tool.name, ANY_ARGUMENTS)
            for index, tool in enumerate(tools)
            if choice.names is None or tool.name in choice.names
        ),
        is_forced=choice.is_forced,
        is_parallel=is_parallel and choice.mode != "named",
        layout=added_layout(tool_format),
    )


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema without notes for its readers."""
    root = dict(schema)
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        for key, value in [*(node.items() if isinstance(node, dict) else enumerate(node))]:
            if isinstance(value, dict | list) and key not in DATA_KEYWORDS:
                node[key] = copy.copy(value)
                waiting.append(node[key])
            # The schema of a property with such a name is no string.
            elif isinstance(value, str) and isinstance(node, dict) and key in _NOTES:
                del node[key]
    return root

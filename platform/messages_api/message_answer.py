"""Builds the response bodies and events of `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from loramux.engine.protocol.service_tiers import DEFAULT_TIER
from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.messages_api.message_blocks import BlockEvents
from loramux.platform.messages_api.message_errors import message_error
from loramux.platform.requests import sse
from loramux.platform.requests.answers import Document

INVALID_JSON = "INVALID_JSON"
"""The key under which an input is returned that is not a JSON object, as Anthropic's documentation proposes."""


class MessageAnswer:
    """Builds the body or the events of one answer. Use one object per request.

    `model` is the name that the client used. With `is_clipped`, the context has less room than `max_tokens`.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        blocks: BlockEvents,
        service_tier: str,
        *,
        is_clipped: bool = False,
    ) -> None:
        self._request_id, self._model, self._prompt_tokens = request_id, model, prompt_tokens
        self._blocks = blocks
        # Anthropic's API calls the default tier `standard`.
        self._service_tier = "standard" if service_tier == DEFAULT_TIER else service_tier
        self._is_clipped = is_clipped
        self._stop: tuple[str, str | None] = ("end_turn", None)
        """The answer's `stop_reason` and `stop_sequence`."""
        self._has_begun = False
        self._has_pinged = False

    def events(self, delta: ChoiceDelta) -> bytes:
        return encoded(self._events(delta))

    def end(self, usage: Usage) -> bytes:
        reason, sequence = self._stop
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": stop, "usage": usage_document(usage)}
        return encoded([last, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        return encoded([message_error(error, self._request_id)])

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        content: list[Document] = []
        for delta in deltas:
            for event in self._blocks_of(delta):
                _add_event(content, event)
        return self._message([_finished(block) for block in content], self._stop, usage)

    def _events(self, delta: ChoiceDelta) -> Iterator[Document]:
        if not self._has_begun:
            self._has_begun = True
            # How much of the prompt was cached is known only at the end.
            usage = Usage(self._prompt_tokens, 0, 0)
            yield {"type": "message_start", "message": self._message([], (None, None), usage)}
        for event in self._blocks_of(delta):
            yield event
            if not self._has_pinged and event["type"] == "content_block_start":
                self._has_pinged = True
                yield {"type": "ping"}

    def _blocks_of(self, delta: ChoiceDelta) -> Iterator[Document]:
        yield from self._blocks.feed(delta)
        if delta.finish_reason is not None:
            self._stop = self._stop_reason(delta)

    def _stop_reason(self, last: ChoiceDelta) -> tuple[str, str | None]:
        if last.finish_reason == "length":
            return ("model_context_window_exceeded" if self._is_clipped else "max_tokens"), None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return ("tool_use" if self._blocks.ends_with_calls else "end_turn"), None

    def _message(self, content: list[Document], stop: tuple[str | None, str | None], usage: Usage) -> Document:
        return {
            "id": f"msg_{self._request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop[0],
            "stop_sequence": stop[1],
            "usage": {**usage_document(usage), "service_tier": self._service_tier},
        }


def encoded(events: Iterable[Document]) -> bytes:
    """Encode events as server-sent events, each with its type as its name."""
    return b"".join(sse.event(event, event["type"]) for event in events)


def usage_document(usage: Usage) -> Document:
    """Return the usage as Anthropic counts it: `input_tokens` are those that were not read from the cache."""
    document: Document = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        document["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return document


def _add_event(content: list[Document], event: Document) -> None:
    """Add an event to the blocks of a whole answer. The input of a tool use remains text until its end."""
    match event:
        case {"type": "content_block_start", "content_block": block}:
            content.append(block | {"input": ""} if block["type"] == "tool_use" else block)
        case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
            content[-1]["input"] += text
        case {"type": "content_block_delta", "delta": delta}:
            content[-1] |= {name: content[-1][name] + text for name, text in delta.items() if name != "type"}


def _finished(block: Document) -> Document:
    return block | {"input": _input(block["input"])} if block["type"] == "tool_use" else block


def _input(text: str) -> Any:
    """Return the input of a tool use as a JSON object. Of a text that was cut off, return what can be read."""
    try:
        # A model can write numbers that are valid JSON but no number of ours, so pass on its own text.
        if isinstance(from_json(text or "{}", allow_inf_nan=False), dict):
            return msgspec.Raw(text.encode() or b"{}")
    except ValueError:
        pass
    try:
        found = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        found = None
    return msgspec.Raw(json.dumps(found if isinstance(found, dict) else {INVALID_JSON: text}).encode())

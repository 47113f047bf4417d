"""Turns a response request into a chat request, which the gateway can prepare and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.request_body import validated
from loramux.platform.bodies.sampling_fields import SamplingFields
from loramux.platform.errors import ApiError
from loramux.platform.requests.answers import Document
from loramux.platform.responses_api.field_names import rename_fields
from loramux.platform.responses_api.input_items import InputItem, refuse_other_items
from loramux.platform.responses_api.input_messages import messages_of
from loramux.platform.responses_api.response_request import LOGPROBS, ResponseRequest, SchemaFormat
from loramux.platform.responses_api.response_tools import (
    chat_tool_choice,
    check_tools,
    offered_tools,
    refuse_built_in_tools,
)


class ResponseChat(ChatRequest):
    """A chat request with the response request that it was.

    `places` says which field each message comes from, and `earlier` are the items before its own. `earlier_adapter_ids`
    are the adapters whose stored answers the request continues or refers to.
    """

    asked: ResponseRequest
    places: tuple[str, ...]
    earlier: tuple[Any, ...]
    earlier_adapter_ids: tuple[str | None, ...] = ()

    def answered_by(self, model: str, service_tier: str) -> Self:
        asked = self.asked.model_copy(update={"model": model, "service_tier": service_tier})
        return super().answered_by(model, service_tier).model_copy(update={"asked": asked})

    def rename_fields(self, error: ApiError) -> None:
        """Make an error about the chat request name the fields of the response request."""
        rename_fields(error, self.places, offered_tools(self.asked.tools or ()))


def read_response_request(document: dict[str, Any]) -> ResponseRequest:
    """Validate a body. Raises InvalidRequest."""
    refuse_built_in_tools(document.get("tools"))
    refuse_other_items(document.get("input"))
    asked = validated(document, ResponseRequest)
    asked.check()
    check_tools(asked.tools or ())
    return asked


def chat_of(asked: ResponseRequest, earlier: Sequence[InputItem] = ()) -> ResponseChat:
    """Turn a request without references into a chat request. `earlier` are the items before its own.

    Raises InvalidRequest.
    """
    place = "previous_response_id" if asked.conversation is None else "conversation"
    messages = messages_of(asked.instructions, asked.input, earlier, place)
    offered = offered_tools(asked.tools or ())
    chat = {
        **{name: getattr(asked, name) for name in SamplingFields.model_fields},
        "messages": messages.documents,
        "max_completion_tokens": asked.max_output_tokens,
        "stream": asked.stream,
        "user": asked.user,
        "service_tier": asked.service_tier,
        "tools": None if asked.tools is None else [tool.as_chat_tool() for tool in offered],
        "tool_choice": chat_tool_choice(asked.tool_choice, offered),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "response_format": _response_format(asked),
        "structured_outputs": asked.structured_outputs,
        "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "asked": asked,
        "places": tuple(messages.places),
        "earlier": tuple(earlier),
    }
    if asked.includes(LOGPROBS):
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    try:
        return validated(chat, ResponseChat)
    except ApiError as error:
        rename_fields(error, messages.places, offered)
        raise


def _response_format(asked: ResponseRequest) -> Document | None:
    wanted = None if asked.text is None else asked.text.format
    if not isinstance(wanted, SchemaFormat):
        return None if wanted is None else {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}

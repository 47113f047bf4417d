"""`POST /v1/responses`: turns input items into a conversation. `request_life.py` runs it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.errors import ApiError, InvalidRequest, MethodNotAllowed
from loramux.platform.generation.plan import Target
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.chat_preparation import constrain_chat
from loramux.platform.requests.endpoint import Endpoint, Prepared, Received
from loramux.platform.requests.message_reader import MessageReader
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.openapi_schemas import ResponseDocument
from loramux.platform.responses_api.response_answer import ResponseAnswer, ResponseRules
from loramux.platform.responses_api.response_chat import ResponseChat, read_response_request
from loramux.platform.responses_api.response_request import ENCRYPTED, ResponseRequest
from loramux.platform.responses_api.response_tools import CustomTool
from loramux.platform.responses_api.truncation import prepare_response
from loramux.platform.tool_calls.parsers import find_parser

router = APIRouter()

FIRST_EVENT = 'event: response.created\ndata: {"type": "response.created"}\n\n'


@router.post(
    "/v1/responses",
    tags=["inference"],
    openapi_extra=takes(ResponseRequest),
    responses={**answers(ResponseDocument, FIRST_EVENT), **errors(*GENERATION_ERRORS)},
)
async def create_response(request: Request, caller: Caller, services: Services) -> Response:
    """Respond to input items, in one response or as a stream of server-sent events. Responses are not stored."""
    read: list[ResponseChat] = []

    def parse(document: dict[str, Any]) -> ResponseChat:
        read.append(read_response_request(document))
        return read[0]

    try:
        return await serve(request, services, caller, replace(RESPONSES, parse=parse))
    except ApiError as error:
        for body in read:
            body.rename_fields(error)
        raise


@router.get("/v1/responses", include_in_schema=False)
async def refuse_websocket(request: Request, caller: Caller) -> Response:
    """Tell clients of OpenAI's websocket mode to use HTTP."""
    if request.headers.get("upgrade", "").lower() == "websocket":
        raise InvalidRequest(
            "websocket mode is not supported: send POST /v1/responses with stream: true",
            param="Upgrade",
            code="unsupported_transport",
        )
    raise MethodNotAllowed("this path does not support the method", headers={"allow": "POST"})


async def _shape(
    services: GatewayServices, target: Target, received: Received[ResponseChat], prepared: Prepared
) -> ResponseAnswer:
    body, tool_format = received.body, prepared.tool_format
    parser = None if tool_format is None else find_parser(tool_format)
    rules = ResponseRules(
        head=_head(received, target, int(time.time())),
        tokenizer=target.tokenizer,
        has_logprobs=body.has_logprobs,
        seals_reasoning=body.asked.includes(ENCRYPTED),
        custom_tools=frozenset(tool.name for tool in body.asked.tools or () if isinstance(tool, CustomTool)),
        note_call=None if tool_format is None else services.metrics.api.tool_calls.labels(tool_format).inc,
        now_s=lambda: int(time.time()),
    )
    return ResponseAnswer(rules, MessageReader(None if parser is None else parser()))


def _head(received: Received[ResponseChat], target: Target, created_s: int) -> Document:
    """Return the fields of the response object that repeat the request, with the defaults that apply."""
    asked = received.body.asked
    sampling = received.body.sampling(target.settings.defaults)
    wanted = None if asked.text is None or asked.text.format is None else asked.text.format
    return {
        "id": f"resp_{received.request_id.removeprefix('req_')}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {
            "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True),
            "verbosity": "medium",
        },
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": [_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


def _tool(tool: Any) -> Document:
    shown: Document = tool.model_dump()
    if isinstance(tool, CustomTool):
        return {**shown, "format": shown["format"] or {"type": "text"}}
    return {**shown, "strict": bool(tool.strict)}


RESPONSES = Endpoint(
    name="responses",
    parse=read_response_request,
    prepare=prepare_response,
    constraint=constrain_chat,
    shape=_shape,
)

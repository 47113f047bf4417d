"""`POST /v1/responses`: turns input items into a conversation. `request_life.py` runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.errors import ApiError, InvalidRequest, MethodNotAllowed
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Target
from loramux.platform.requests.answers import Answer, Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.chat_preparation import constrain_chat
from loramux.platform.requests.endpoint import Endpoint, Prepared, Received
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.message_reader import MessageReader
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import prepare, resolve, serve_received
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.background import begin_in_background
from loramux.platform.responses_api.keeping import Keeping, check_stored, home, is_stored
from loramux.platform.responses_api.openapi_schemas import InputTokensDocument, ResponseDocument
from loramux.platform.responses_api.response_answer import ResponseAnswer, ResponseRules
from loramux.platform.responses_api.response_chat import ResponseChat
from loramux.platform.responses_api.response_input import read_line, read_response
from loramux.platform.responses_api.response_request import ENCRYPTED, ResponseRequest
from loramux.platform.responses_api.response_tools import CustomTool, NamespaceTool, offered_tools
from loramux.platform.responses_api.truncation import prepare_response
from loramux.platform.tool_calls.parsers import parser_factory

router = APIRouter()


@router.post(
    "/v1/responses",
    tags=["inference"],
    openapi_extra=takes(ResponseRequest),
    responses={**answers(ResponseDocument, "response.created"), **errors(*GENERATION_ERRORS)},
)
async def create_response(request: Request, caller: Caller, services: Services) -> Response:
    """Respond to input items, in one response or as a stream of server-sent events."""
    received = await read_response(request, services, caller)
    try:
        received.body.check()
        if received.body.asked.background:
            return await begin_in_background(request, services, caller, RESPONSES, received)
        return await serve_received(request, services, caller, RESPONSES, received)
    except ApiError as error:
        received.body.rename_fields(error)
        raise


@router.post(
    "/v1/responses/input_tokens",
    tags=["tokens"],
    openapi_extra=takes(ResponseRequest),
    response_model=InputTokensDocument,
    responses=errors(404, 409),
)
async def count_input_tokens(request: Request, caller: Caller, services: Services) -> Response:
    """Count the input tokens of a response, without running it. No quota is charged."""
    received = await read_response(request, services, caller)
    try:
        received.body.check()
        target = await resolve(services, caller, received.body.model, received.body.user)
        [prompt] = (await prepare(services, RESPONSES, target, received)).prompts
    except ApiError as error:
        received.body.rename_fields(error)
        raise
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})


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
    await check_stored(services, target, received)
    body, tool_format = received.body, prepared.tool_format
    new_parser = parser_factory(tool_format, body.argument_schemas)
    rules = ResponseRules(
        head=_head(services, target, received, int(time.time())),
        tokenizer=target.tokenizer,
        has_logprobs=body.has_logprobs,
        seals_reasoning=body.asked.includes(ENCRYPTED),
        tools={tool.called_name: tool for tool in offered_tools(body.asked.tools or ())},
        note_call=None if tool_format is None else services.metrics.api.tool_calls.labels(tool_format).inc,
        home=home(received),
        now_s=lambda: int(time.time()),
        keep=Keeping(services, target, received).keep,
    )
    return ResponseAnswer(rules, MessageReader(None if new_parser is None else new_parser()))


async def _keep(answer: Answer, deltas: Sequence[ChoiceDelta], usage: Usage) -> None:
    assert isinstance(answer, ResponseAnswer)
    await answer.keep(deltas, usage)


def _head(services: GatewayServices, target: Target, received: Received[ResponseChat], created_s: int) -> Document:
    """Return the fields of the response object that repeat the request, with the defaults that apply."""
    asked = received.body.asked
    sampling = received.body.sampling(target.settings.defaults)
    wanted = None if asked.text is None or asked.text.format is None else asked.text.format
    return {
        "id": f"resp_{home(received)}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "conversation": None if asked.conversation is None else {"id": asked.conversation},
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": target.tiers.tier(asked.service_tier),
        "store": is_stored(services, target, received),
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
    if isinstance(tool, NamespaceTool):
        return {**shown, "tools": [_tool(one) for one in tool.tools]}
    if isinstance(tool, CustomTool):
        return {**shown, "format": shown["format"] or {"type": "text"}}
    return {**shown, "strict": bool(tool.strict)}


RESPONSES = Endpoint(
    name="responses",
    parse=read_line,
    prepare=prepare_response,
    constraint=constrain_chat,
    shape=_shape,
    keep=_keep,
)

"""`POST /invocations`, the name of inference calls in Amazon SageMaker's contract for containers.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.bodies.request_body import parse_body_on, read_body
from loramux.platform.openai_api.chat import CHAT
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.openai_api.completions import COMPLETIONS
from loramux.platform.openai_api.openapi_schemas import ChatDocument, CompletionDocument
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import Endpoint, Received
from loramux.platform.requests.error_responses import request_id_of
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import serve_received

router = APIRouter()


@router.post(
    "/invocations",
    tags=["inference"],
    openapi_extra=takes(ChatRequest, CompletionRequest),
    responses={**answers(ChatDocument | CompletionDocument), **errors(*GENERATION_ERRORS)},
)
async def create_invocation(request: Request, caller: Caller, services: Services) -> Response:
    """Complete a conversation or a prompt. A body with `messages` is answered like `/v1/chat/completions`, any other
    body like `/v1/completions`.
    """
    sent = await read_body(request, services.settings.max_body_bytes)
    endpoint, body = await parse_body_on(services.compute, sent, _parsed)
    body.check()
    return await serve_received(request, services, caller, endpoint, Received(request_id_of(request), body, len(sent)))


def _parsed(document: dict[str, Any]) -> tuple[Endpoint[Any], GenerationRequest]:
    endpoint: Endpoint[Any] = CHAT if "messages" in document else COMPLETIONS
    return endpoint, endpoint.parse(document)

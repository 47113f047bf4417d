"""`POST /invocations`, the name of inference calls in Amazon SageMaker's contract for containers.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.request_body import parse_object, read_body
from loramux.platform.bodies.sampling_fields import MAX_MODEL_NAME
from loramux.platform.generation.plan import Target
from loramux.platform.openai_api.chat import CHAT
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.openai_api.completions import COMPLETIONS
from loramux.platform.openai_api.openapi_schemas import ChatDocument, CompletionDocument
from loramux.platform.pooling_api.classification import CLASSIFICATION
from loramux.platform.pooling_api.embeddings import EMBEDDINGS
from loramux.platform.pooling_api.pair_request import SIDES, RerankRequest, ScoreRequest
from loramux.platform.pooling_api.pooled_documents import (
    ClassesDocument,
    EmbeddingsDocument,
    PoolingDocument,
    RankingDocument,
    ScoresDocument,
)
from loramux.platform.pooling_api.pooled_plan import classifier_of
from loramux.platform.pooling_api.pooled_request import (
    ClassifyChat,
    ClassifyRequest,
    EmbeddingChat,
    EmbeddingRequest,
    PoolingChat,
    PoolingRequest,
)
from loramux.platform.pooling_api.pooling import POOLING
from loramux.platform.pooling_api.scores import RANKING, SCORES
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import AnyEndpoint, Received
from loramux.platform.requests.error_responses import request_id_of
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import resolve, serve_received

BODIES = (
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingChat,
    ClassifyRequest,
    ClassifyChat,
    ScoreRequest,
    RerankRequest,
    PoolingRequest,
    PoolingChat,
)
DOCUMENTS = (
    ChatDocument
    | CompletionDocument
    | EmbeddingsDocument
    | ClassesDocument
    | ScoresDocument
    | RankingDocument
    | PoolingDocument
)
VECTOR_FIELDS = frozenset({"encoding_format", "dimensions", "normalize", "use_activation", "embed_dtype", "endianness"})
"""Fields by which a conversation asks for its embedding."""
PAIR_FIELDS = frozenset(name for sides in SIDES for name in sides)

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/invocations", openapi_extra=takes(ChatRequest, *BODIES), responses=answers(DOCUMENTS, has_vectors=True))
async def create_invocation(request: Request, caller: Caller, services: Services) -> Response:
    """Run a request for inference. The fields of the body, and the task of the model, decide which call answers it."""
    sent = await read_body(request, services.settings.max_body_bytes)
    document = await services.compute_if_long(len(sent), parse_object, sent)
    name, user = document.get("model"), document.get("user")
    target = None
    # The endpoint refuses any other name.
    if isinstance(name, str) and len(name) <= MAX_MODEL_NAME:
        target = await resolve(services, caller, name, user if isinstance(user, str) else None)
    endpoint = _endpoint(document, target)
    body = await services.compute_if_long(len(sent), endpoint.parse, document)
    body.check()
    received = Received(request_id_of(request), body, len(sent))
    return await serve_received(request, services, caller, endpoint, received, target)


def _endpoint(document: Mapping[str, Any], target: Target | None) -> AnyEndpoint:
    fields = {name for name, value in document.items() if value is not None}
    is_classifier = target is not None and classifier_of(target) is not None
    if "task" in fields:
        return POOLING
    if "messages" in fields:
        if is_classifier:
            return CLASSIFICATION
        return EMBEDDINGS if fields & VECTOR_FIELDS else CHAT
    if "prompt" in fields:
        return COMPLETIONS
    if "query" in fields:
        return RANKING
    if fields & PAIR_FIELDS:
        return SCORES
    if "input" in fields:
        return CLASSIFICATION if is_classifier else EMBEDDINGS
    return COMPLETIONS

"""`POST /v1/embeddings`, as in OpenAI's API and vLLM (https://platform.openai.com/docs/api-reference/embeddings)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import (
    RawVectorsAnswer,
    VectorForm,
    VectorOf,
    VectorsAnswer,
    vectors_answer,
)
from loramux.platform.pooling_api.pooled_documents import EmbeddingsDocument
from loramux.platform.pooling_api.pooled_plan import prompts_plan
from loramux.platform.pooling_api.pooled_request import (
    AnyEmbedding,
    AnyPooling,
    EmbeddingChat,
    EmbeddingRequest,
    InputFields,
    parses,
)
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers_vectors, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

MAX_NUMBERS = 1 << 22
"""Maximum number of numbers in one answer. As base64, they take 22 MB."""

NAME = "embeddings"
FORM = VectorForm(prefix="embd", kind="embedding", field="embedding")

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post(
    "/v1/embeddings",
    openapi_extra=takes(EmbeddingRequest, EmbeddingChat),
    responses=answers_vectors(EmbeddingsDocument),
)
async def create_embeddings(request: Request, caller: Caller, services: Services) -> Response:
    """Make a vector of each input (text or token ids), or of a conversation."""
    return await serve(request, services, caller, EMBEDDINGS)


async def embedding_plan(
    services: GatewayServices, name: str, target: Target, received: Received[AnyEmbedding | AnyPooling]
) -> tuple[Plan, VectorOf]:
    """Return the plan of a request of the endpoint `name` that makes embeddings, and what makes each vector.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    body, pooling = received.body, target.settings.pooling
    num_vectors = len(body.input) if isinstance(body, InputFields) else 1
    check_vectors(services, num_vectors, body.dimensions, ("input", "dimensions"))
    plan = await prompts_plan(services, name, target, received, pooling.kind)
    is_normalized = pooling.is_normalized if body.normalizes is None else body.normalizes
    return plan, partial(embedding_of, dimensions=body.dimensions, is_normalized=is_normalized)


def check_vectors(services: GatewayServices, num_vectors: int, dimensions: int | None, params: tuple[str, str]) -> None:
    """Raise InvalidRequest unless the model has this many dimensions, and all vectors fit into one answer.

    `params` are the fields with the texts and with the dimensions.
    """
    size, (texts, name) = services.model.hidden_size, params
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(f"the model's embeddings have {size} dimensions, and no more", param=name)
    num_numbers = num_vectors * (dimensions or size)
    if num_numbers > MAX_NUMBERS:
        raise InvalidRequest(
            f"the answer would have {num_numbers} numbers, but at most {MAX_NUMBERS} are allowed: send fewer inputs at "
            f"a time, or set {name}",
            param=texts,
        )


async def _plan(
    services: GatewayServices, target: Target, received: Received[AnyEmbedding]
) -> tuple[Plan, VectorsAnswer | RawVectorsAnswer]:
    plan, vector_of = await embedding_plan(services, NAME, target, received)
    return plan, vectors_answer(received, len(plan.prompts), vector_of, FORM)


EMBEDDINGS = PooledEndpoint(name=NAME, parse=parses(EmbeddingRequest, EmbeddingChat), plan=_plan)


def _parse_line(document: dict[str, Any]) -> AnyEmbedding:
    body = EMBEDDINGS.parse(document)
    if body.is_raw:
        raise InvalidRequest(
            "the answer to a line of a batch is a document: use the encoding format float or base64",
            param="encoding_format",
            code="unsupported_parameter",
        )
    return body


EMBEDDING_LINES = replace(EMBEDDINGS, parse=_parse_line)
"""The endpoint for lines of batches."""

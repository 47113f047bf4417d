"""`POST /v1/embeddings`, as in OpenAI's API and vLLM (https://platform.openai.com/docs/api-reference/embeddings)."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import VectorOf, VectorsAnswer
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
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

MAX_NUMBERS = 1 << 22
"""Maximum number of numbers in one answer. As base64, they take 22 MB."""

NAME = "embeddings"

router = APIRouter()


@router.post(
    "/v1/embeddings",
    tags=["inference"],
    openapi_extra=takes(EmbeddingRequest, EmbeddingChat),
    response_model=EmbeddingsDocument,
    responses=errors(*GENERATION_ERRORS),
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
    body, pooling, size = received.body, target.settings.pooling, services.model.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(f"the model's embeddings have {size} dimensions, and no more", param="dimensions")
    num_numbers = (len(body.input) if isinstance(body, InputFields) else 1) * (body.dimensions or size)
    if num_numbers > MAX_NUMBERS:
        raise InvalidRequest(
            f"the answer would have {num_numbers} numbers, but at most {MAX_NUMBERS} are allowed: send fewer inputs at "
            "a time, or set dimensions",
            param="input",
        )
    plan = await prompts_plan(services, name, target, received, pooling.kind)
    is_normalized = pooling.is_normalized if body.normalizes is None else body.normalizes
    return plan, partial(embedding_of, dimensions=body.dimensions, is_normalized=is_normalized)


async def _plan(
    services: GatewayServices, target: Target, received: Received[AnyEmbedding]
) -> tuple[Plan, VectorsAnswer]:
    body = received.body
    plan, vector_of = await embedding_plan(services, NAME, target, received)
    return plan, VectorsAnswer(
        request_id=received.request_id,
        model=body.model,
        created_s=int(time.time()),
        vector_of=vector_of,
        is_base64=body.encoding_format == "base64",
    )


EMBEDDINGS = PooledEndpoint(name=NAME, parse=parses(EmbeddingRequest, EmbeddingChat), plan=_plan)

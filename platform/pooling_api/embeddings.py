"""`POST /v1/embeddings`, as in OpenAI's API and vLLM (https://platform.openai.com/docs/api-reference/embeddings)."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import EmbeddingsDocument
from loramux.platform.pooling_api.pooled_plan import pooled_plan
from loramux.platform.pooling_api.pooled_request import EmbeddingRequest
from loramux.platform.requests.answers import Document
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
    openapi_extra=takes(EmbeddingRequest),
    response_model=EmbeddingsDocument,
    responses=errors(*GENERATION_ERRORS),
)
async def create_embeddings(request: Request, caller: Caller, services: Services) -> Response:
    """Make a vector of each input (text or token ids)."""
    return await serve(request, services, caller, EMBEDDINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsAnswer(PooledAnswer):
    """`dimensions` is the length of the vectors, or None for that of the hidden states."""

    is_base64: bool
    dimensions: int | None
    is_normalized: bool

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        data = [
            {"object": "embedding", "index": delta.index, "embedding": self._shown(delta.pooled)}
            for delta in sorted(deltas, key=lambda delta: delta.index)
        ]
        return {**self.head("embd"), "data": data, "usage": pooled_usage(usage)}

    def _shown(self, pooled: bytes) -> str | msgspec.Raw:
        vector = embedding_of(pooled, self.dimensions, self.is_normalized)
        if self.is_base64:
            return base64.b64encode(vector.tobytes()).decode()
        # Encoded one by one, because Python's numbers take four times as much memory as their digits.
        return msgspec.Raw(msgspec.json.encode(vector.tolist()))


async def _plan(
    services: GatewayServices, target: Target, received: Received[EmbeddingRequest]
) -> tuple[Plan, EmbeddingsAnswer]:
    body, pooling, size = received.body, target.settings.pooling, services.model.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(f"the model's embeddings have {size} dimensions, and no more", param="dimensions")
    num_numbers = len(body.input) * (body.dimensions or size)
    if num_numbers > MAX_NUMBERS:
        raise InvalidRequest(
            f"the answer would have {num_numbers} numbers, but at most {MAX_NUMBERS} are allowed: send fewer inputs at "
            "a time, or set dimensions",
            param="input",
        )
    plan = await pooled_plan(services, NAME, target, received, body.input, pooling.kind)
    return plan, EmbeddingsAnswer(
        request_id=received.request_id,
        model=body.model,
        created_s=int(time.time()),
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        is_normalized=pooling.is_normalized if body.normalizes is None else body.normalizes,
    )


EMBEDDINGS = PooledEndpoint(name=NAME, parse=partial(validated, model=EmbeddingRequest), plan=_plan)

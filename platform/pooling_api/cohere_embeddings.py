"""`POST /v1/embed` and `/v2/embed`, as in Cohere's API and vLLM (https://docs.cohere.com/reference/embed)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from loramux.engine.sequences.embedding import embedding_of
from loramux.engine.text.truncation import Truncation
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.prompts import MAX_PROMPTS
from loramux.platform.bodies.request_body import validated
from loramux.platform.bodies.sampling_fields import INT64
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.embeddings import NAME, check_vectors
from loramux.platform.pooling_api.pooled_answer import Binary, PooledAnswer, VectorOf, in_digits, in_order
from loramux.platform.pooling_api.pooled_documents import EmbedDocument, TypedEmbedDocument
from loramux.platform.pooling_api.pooled_plan import pooled_plan
from loramux.platform.pooling_api.pooled_request import PooledFields
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

ApiVersion: TypeAlias = Literal["1", "2"]
EmbeddingType: TypeAlias = Literal["float", "base64"]

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


class EmbedRequest(PooledFields):
    """The body of `/v1/embed` and `/v2/embed`."""

    NEUTRAL: ClassVar[Neutral] = unsupported_fields.EMBED

    texts: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    # The server adds no text to prompts, whatever they are for.
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(fail_fast=True)] | None = None
    output_dimension: int | None = Field(None, ge=1, lt=INT64)
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)

    def truncation(self, max_model_len: int) -> Truncation | None:
        if self.truncate == "NONE":
            return None
        return Truncation(min(self.max_tokens or max_model_len, max_model_len), keeps_end=self.truncate == "START")


@router.post("/v1/embed", openapi_extra=takes(EmbedRequest), response_model=EmbedDocument | TypedEmbedDocument)
async def create_embed_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Make a vector of each text, as in version 1 of Cohere's API."""
    return await serve(request, services, caller, EMBED_V1)


@router.post("/v2/embed", openapi_extra=takes(EmbedRequest), response_model=TypedEmbedDocument)
async def create_embed_v2(request: Request, caller: Caller, services: Services) -> Response:
    """Make a vector of each text, as in version 2 of Cohere's API."""
    return await serve(request, services, caller, EMBED_V2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedAnswer(PooledAnswer):
    """A document with a list of vectors of each of the `types`, or of numbers alone if `types` is None."""

    vector_of: VectorOf
    texts: Sequence[str]
    types: Sequence[EmbeddingType] | None
    version: ApiVersion

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        pooled = [delta.pooled for delta in in_order(deltas)]
        embeddings: Any
        if self.types is None:
            kind, embeddings = "embeddings_floats", self._shown(pooled, "float")
        else:
            kind, embeddings = "embeddings_by_type", {one: self._shown(pooled, one) for one in self.types}
        return {
            "id": self.identifier("embd"),
            "response_type": kind,
            "embeddings": embeddings,
            "texts": self.texts,
            "meta": {
                "api_version": {"version": self.version},
                "billed_units": {"input_tokens": usage.prompt_tokens},
            },
        }

    def _shown(self, pooled: Sequence[bytes], kind: EmbeddingType) -> list[str] | list[msgspec.Raw]:
        vectors = map(self.vector_of, pooled)
        if kind == "base64":
            return list(map(Binary("float32", "little").in_base64, vectors))
        return list(map(in_digits, vectors))


async def _plan(
    version: ApiVersion, services: GatewayServices, target: Target, received: Received[EmbedRequest]
) -> tuple[Plan, EmbedAnswer]:
    body, pooling = received.body, target.settings.pooling
    # A repeated type needs no work of its own.
    types = list(dict.fromkeys(body.embedding_types or ())) or (None if version == "1" else ["float"])
    num_vectors = len(body.texts) * (1 if types is None else len(types))
    check_vectors(services, num_vectors, body.output_dimension, ("texts", "output_dimension"))
    plan = await pooled_plan(services, NAME, target, received, body.texts, pooling.kind, "texts")
    if body.truncate == "NONE":
        _check_lengths(plan, body.max_tokens)
    return plan, EmbedAnswer(
        request_id=received.request_id,
        model=body.model,
        vector_of=partial(embedding_of, dimensions=body.output_dimension, is_normalized=pooling.is_normalized),
        texts=body.texts,
        types=types,
        version=version,
    )


def _check_lengths(plan: Plan, max_tokens: int | None) -> None:
    for index, prompt in enumerate(plan.prompts):
        if max_tokens is not None and len(prompt) > max_tokens:
            raise InvalidRequest(
                f"texts[{index}] has {len(prompt)} tokens, but max_tokens is {max_tokens} and truncate is NONE",
                param="max_tokens",
            )


_parse = partial(validated, model=EmbedRequest)
EMBED_V1 = PooledEndpoint(name=NAME, parse=_parse, plan=partial(_plan, "1"))
EMBED_V2 = PooledEndpoint(name=NAME, parse=_parse, plan=partial(_plan, "2"))

"""`POST /pooling`, as in vLLM: the embeddings or the classes of prompts, by what the model is for."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.adapter_store.formats.version_files.adapter_task import Activation
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.classification import classification_plan
from loramux.platform.pooling_api.embeddings import embedding_plan
from loramux.platform.pooling_api.pooled_answer import (
    RawVectorsAnswer,
    VectorForm,
    VectorOf,
    VectorsAnswer,
    vectors_answer,
)
from loramux.platform.pooling_api.pooled_documents import PoolingDocument
from loramux.platform.pooling_api.pooled_plan import classifier_of
from loramux.platform.pooling_api.pooled_request import AnyPooling, PoolingChat, PoolingRequest, parses
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers_vectors, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

NAME = "pooling"
FORM = VectorForm(prefix="pool", kind="pooling", field="data")

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/pooling", openapi_extra=takes(PoolingRequest, PoolingChat), responses=answers_vectors(PoolingDocument))
async def create_pooled(request: Request, caller: Caller, services: Services) -> Response:
    """Return the embedding of each input, or the probabilities of its classes if the model is a classifier."""
    return await serve(request, services, caller, POOLING)


async def _plan(
    services: GatewayServices, target: Target, received: Received[AnyPooling]
) -> tuple[Plan, VectorsAnswer | RawVectorsAnswer]:
    body = received.body
    vector_of: VectorOf
    if body.task == "classify" or (body.task is None and classifier_of(target) is not None):
        _check_no_embedding_fields(body)
        plan, _, activation = await classification_plan(services, NAME, target, received)
        vector_of = partial(_probabilities, activation=activation)
    else:
        plan, vector_of = await embedding_plan(services, NAME, target, received)
    return plan, vectors_answer(received, len(plan.prompts), vector_of, FORM)


def _check_no_embedding_fields(body: AnyPooling) -> None:
    for param in ("dimensions", "normalize"):
        if getattr(body, param) is not None:
            raise InvalidRequest(
                f"{param} is for embeddings, and classes have none", param=param, code="unsupported_parameter"
            )


def _probabilities(pooled: bytes, activation: Activation) -> npt.NDArray[np.float32]:
    return class_probabilities(pooled, activation).astype("<f4")


POOLING = PooledEndpoint(name=NAME, parse=parses(PoolingRequest, PoolingChat), plan=_plan)

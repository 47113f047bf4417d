"""`POST /classify` and `POST /v1/classify`, as in vLLM: the classes of texts, by adapters trained for this."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.adapter_store.formats.version_files.adapter_task import Activation
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import ClassesDocument
from loramux.platform.pooling_api.pooled_plan import classifier_of, pooled_plan
from loramux.platform.pooling_api.pooled_request import ClassifyRequest
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

NAME = "classify"

router = APIRouter()


@router.post(
    "/classify",
    tags=["inference"],
    openapi_extra=takes(ClassifyRequest),
    response_model=ClassesDocument,
    responses=errors(*GENERATION_ERRORS),
)
async def create_classes(request: Request, caller: Caller, services: Services) -> Response:
    """Classify each input (text or token ids) with an adapter that was trained for sequence classification."""
    return await serve(request, services, caller, CLASSIFICATION)


@router.post(
    "/v1/classify",
    tags=["inference"],
    openapi_extra=takes(ClassifyRequest),
    response_model=ClassesDocument,
    responses=errors(*GENERATION_ERRORS),
)
async def create_classes_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /classify`."""
    return await serve(request, services, caller, CLASSIFICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassesAnswer(PooledAnswer):
    labels: tuple[str, ...]
    activation: Activation

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        data = [self._classified(delta) for delta in sorted(deltas, key=lambda delta: delta.index)]
        return {**self.head("classify"), "data": data, "usage": pooled_usage(usage)}

    def _classified(self, delta: ChoiceDelta) -> Document:
        probabilities = class_probabilities(delta.pooled, self.activation)
        return {
            "index": delta.index,
            "label": self.labels[int(probabilities.argmax())],
            "probs": probabilities.tolist(),
            "num_classes": len(self.labels),
        }


async def _plan(
    services: GatewayServices, target: Target, received: Received[ClassifyRequest]
) -> tuple[Plan, ClassesAnswer]:
    body, task = received.body, classifier_of(target)
    if task is None:
        raise InvalidRequest(
            f"{target.model.name} is not a classifier: call an adapter whose task type is SEQ_CLS",
            param="model",
            code="wrong_task",
        )
    plan = await pooled_plan(services, NAME, target, received, body.input, "last", num_labels=len(task.labels))
    return plan, ClassesAnswer(
        request_id=received.request_id,
        model=body.model,
        created_s=int(time.time()),
        labels=task.labels,
        activation="identity" if body.use_activation is False else task.activation,
    )


CLASSIFICATION = PooledEndpoint(name=NAME, parse=partial(validated, model=ClassifyRequest), plan=_plan)

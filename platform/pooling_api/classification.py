"""`POST /classify` and `POST /v1/classify`, as in vLLM: the classes of texts, by adapters trained for this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.adapter_store.formats.version_files.adapter_task import Activation, AdapterTask
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import ClassesDocument
from loramux.platform.pooling_api.pooled_plan import classifier_of, prompts_plan
from loramux.platform.pooling_api.pooled_request import AnyClassify, AnyPooling, ClassifyChat, ClassifyRequest, parses
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

NAME = "classify"

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/classify", openapi_extra=takes(ClassifyRequest, ClassifyChat), response_model=ClassesDocument)
async def create_classes(request: Request, caller: Caller, services: Services) -> Response:
    """Classify each input (text or token ids), or a conversation, with an adapter that was trained for this."""
    return await serve(request, services, caller, CLASSIFICATION)


@router.post("/v1/classify", openapi_extra=takes(ClassifyRequest, ClassifyChat), response_model=ClassesDocument)
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


async def classification_plan(
    services: GatewayServices, name: str, target: Target, received: Received[AnyClassify | AnyPooling]
) -> tuple[Plan, AdapterTask, Activation]:
    """Return the plan of a request of the endpoint `name` that classifies prompts, the model's task, and how logits
    become probabilities.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    task = classifier_of(target)
    if task is None:
        raise InvalidRequest(
            f"{target.model.name} is not a classifier: call an adapter whose task type is SEQ_CLS",
            param="model",
            code="wrong_task",
        )
    plan = await prompts_plan(services, name, target, received, "last", num_labels=len(task.labels))
    return plan, task, "identity" if received.body.use_activation is False else task.activation


async def _plan(
    services: GatewayServices, target: Target, received: Received[AnyClassify]
) -> tuple[Plan, ClassesAnswer]:
    plan, task, activation = await classification_plan(services, NAME, target, received)
    return plan, ClassesAnswer(
        request_id=received.request_id,
        model=received.body.model,
        labels=task.labels,
        activation=activation,
    )


CLASSIFICATION = PooledEndpoint(name=NAME, parse=parses(ClassifyRequest, ClassifyChat), plan=_plan)

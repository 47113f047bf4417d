"""`POST /score` and `POST /v1/score`, as in vLLM: how well the texts of pairs go together.

A classifier with one label reads both texts as one prompt, and its logit is the score. Other models make embeddings of
the texts, and the score is their cosine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.adapter_store.formats.version_files.adapter_task import Activation
from loramux.engine.sequences.class_probabilities import class_probabilities
from loramux.engine.sequences.embedding import embedding_of
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import ScoresDocument
from loramux.platform.pooling_api.pooled_plan import TextPair, classifier_of, pooled_plan
from loramux.platform.pooling_api.pooled_request import ScoreRequest
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

NAME = "score"

router = APIRouter()


@router.post(
    "/score",
    tags=["inference"],
    openapi_extra=takes(ScoreRequest),
    response_model=ScoresDocument,
    responses=errors(*GENERATION_ERRORS),
)
async def create_scores(request: Request, caller: Caller, services: Services) -> Response:
    """Score pairs of texts: by a classifier with one label, or by the cosine of their embeddings."""
    return await serve(request, services, caller, SCORES)


@router.post(
    "/v1/score",
    tags=["inference"],
    openapi_extra=takes(ScoreRequest),
    response_model=ScoresDocument,
    responses=errors(*GENERATION_ERRORS),
)
async def create_scores_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /score`."""
    return await serve(request, services, caller, SCORES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedScores(PooledAnswer):
    """Scores of pairs that are classified: prompt `i` is pair `i`."""

    activation: Activation

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        ordered = sorted(deltas, key=lambda delta: delta.index)
        scores = [float(class_probabilities(delta.pooled, self.activation)[0]) for delta in ordered]
        return _document(self, scores, usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScores(PooledAnswer):
    """Scores of pairs whose texts have embeddings: prompts `places[i]` are those of pair `i`."""

    places: Sequence[tuple[int, int]]

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        vectors = {delta.index: embedding_of(delta.pooled, None, is_normalized=True) for delta in deltas}
        scores = [float(vectors[first] @ vectors[second]) for first, second in self.places]
        return _document(self, scores, usage)


def _document(answer: PooledAnswer, scores: Sequence[float], usage: Usage) -> Document:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {**answer.head("score"), "data": data, "usage": pooled_usage(usage)}


async def _plan(
    services: GatewayServices, target: Target, received: Received[ScoreRequest]
) -> tuple[Plan, ClassifiedScores | ComparedScores]:
    body, task = received.body, classifier_of(target)
    pairs, param, created_s = body.pairs, body.names[1], int(time.time())
    if task is None:
        # Each text is run, and billed, once.
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        place = {text: index for index, text in enumerate(texts)}
        plan = await pooled_plan(services, NAME, target, received, texts, target.settings.pooling.kind, param)
        places = [(place[first], place[second]) for first, second in pairs]
        return plan, ComparedScores(
            request_id=received.request_id, model=body.model, created_s=created_s, places=places
        )
    if len(task.labels) != 1:
        raise InvalidRequest(
            f"{target.model.name} has {len(task.labels)} classes, but a score needs a classifier with one: "
            "call /classify",
            param="model",
            code="wrong_task",
        )
    joined = [TextPair(first, second) for first, second in pairs]
    plan = await pooled_plan(services, NAME, target, received, joined, "last", param, num_labels=1)
    return plan, ClassifiedScores(
        request_id=received.request_id,
        model=body.model,
        created_s=created_s,
        activation="identity" if body.use_activation is False else task.activation,
    )


SCORES = PooledEndpoint(name=NAME, parse=partial(validated, model=ScoreRequest), plan=_plan)

"""`POST /score` and `POST /v1/score`, as in vLLM: how well the texts of pairs go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.bodies.request_body import validated
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Plan, Target
from loramux.platform.pooling_api.pair_request import ScoreRequest
from loramux.platform.pooling_api.pair_scores import ScoredPairs, pairs_plan
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import ScoresDocument
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

NAME = "score"

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/score", openapi_extra=takes(ScoreRequest), response_model=ScoresDocument)
async def create_scores(request: Request, caller: Caller, services: Services) -> Response:
    """Score pairs of texts: by a classifier with one label, or by the cosine of their embeddings."""
    return await serve(request, services, caller, SCORES)


@router.post("/v1/score", openapi_extra=takes(ScoreRequest), response_model=ScoresDocument)
async def create_scores_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /score`."""
    return await serve(request, services, caller, SCORES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresAnswer(PooledAnswer):
    scored: ScoredPairs

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        scores = self.scored.scores(deltas)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**self.head("score"), "data": data, "usage": pooled_usage(usage)}


async def _plan(
    services: GatewayServices, target: Target, received: Received[ScoreRequest]
) -> tuple[Plan, ScoresAnswer]:
    plan, scored = await pairs_plan(services, NAME, target, received)
    return plan, ScoresAnswer(request_id=received.request_id, model=received.body.model, scored=scored)


SCORES = PooledEndpoint(name=NAME, parse=partial(validated, model=ScoreRequest), plan=_plan)

"""How well the texts of pairs go together: `POST /score`, as in vLLM, and `POST /rerank`, as in vLLM, Jina and Cohere,
which puts documents in the order of their relevance to a query.
"""

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
from loramux.platform.pooling_api.pair_request import RerankRequest, ScoreRequest
from loramux.platform.pooling_api.pair_scores import ScoredPairs, pairs_plan
from loramux.platform.pooling_api.pooled_answer import PooledAnswer, pooled_usage
from loramux.platform.pooling_api.pooled_documents import RankingDocument, ScoresDocument
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import PooledEndpoint, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

SCORE, RERANK = "score", "rerank"

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/score", openapi_extra=takes(ScoreRequest), response_model=ScoresDocument)
async def create_scores(request: Request, caller: Caller, services: Services) -> Response:
    """Score pairs of texts: by a classifier with one label, or by the cosine of their embeddings."""
    return await serve(request, services, caller, SCORES)


@router.post("/v1/score", openapi_extra=takes(ScoreRequest), response_model=ScoresDocument)
async def create_scores_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /score`."""
    return await serve(request, services, caller, SCORES)


@router.post("/rerank", openapi_extra=takes(RerankRequest), response_model=RankingDocument)
async def create_ranking(request: Request, caller: Caller, services: Services) -> Response:
    """Order documents by their relevance to a query, most relevant first. The scores are those of `POST /score`."""
    return await serve(request, services, caller, RANKING)


@router.post("/v1/rerank", openapi_extra=takes(RerankRequest), response_model=RankingDocument)
async def create_ranking_v1(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /rerank`, as in Jina's API."""
    return await serve(request, services, caller, RANKING)


@router.post("/v2/rerank", openapi_extra=takes(RerankRequest), response_model=RankingDocument)
async def create_ranking_v2(request: Request, caller: Caller, services: Services) -> Response:
    """Another name of `POST /rerank`, as in Cohere's API."""
    return await serve(request, services, caller, RANKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresAnswer(PooledAnswer):
    scored: ScoredPairs

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        scores = self.scored.scores(deltas)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**self.head("score"), "data": data, "usage": pooled_usage(usage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingAnswer(PooledAnswer):
    scored: ScoredPairs
    documents: Sequence[str]
    num_results: int
    shows_documents: bool

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        scores = self.scored.scores(deltas)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.num_results]
        return {
            "id": self.identifier("rerank"),
            "model": self.model,
            "usage": pooled_usage(usage),
            "results": [self._result(index, scores[index]) for index in ranked],
        }

    def _result(self, index: int, score: float) -> Document:
        shown: Document = {"document": {"text": self.documents[index]}} if self.shows_documents else {}
        return {"index": index, **shown, "relevance_score": score}


async def _score_plan(
    services: GatewayServices, target: Target, received: Received[ScoreRequest]
) -> tuple[Plan, ScoresAnswer]:
    plan, scored = await pairs_plan(services, SCORE, target, received)
    return plan, ScoresAnswer(request_id=received.request_id, model=received.body.model, scored=scored)


async def _ranking_plan(
    services: GatewayServices, target: Target, received: Received[RerankRequest]
) -> tuple[Plan, RankingAnswer]:
    body = received.body
    plan, scored = await pairs_plan(services, RERANK, target, received)
    return plan, RankingAnswer(
        request_id=received.request_id,
        model=body.model,
        scored=scored,
        documents=body.documents,
        num_results=body.top_n or len(body.documents),
        shows_documents=body.return_documents is not False,
    )


SCORES = PooledEndpoint(name=SCORE, parse=partial(validated, model=ScoreRequest), plan=_score_plan)
RANKING = PooledEndpoint(name=RERANK, parse=partial(validated, model=RerankRequest), plan=_ranking_plan)

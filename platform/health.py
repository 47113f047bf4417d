"""`/health/live` and `/health/ready`, on both listeners and without a key."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from loramux.migrations.database import Database
from loramux.platform.engine_client import EngineClient
from loramux.platform.error_responses import json_response
from loramux.platform.openapi import Responses
from loramux.platform.openapi_answers import HealthDocument
from loramux.platform.services import call_on

DATABASE_WAIT_S = 2.0


def health_router(
    database: Database, engine: EngineClient, executor: Executor, *, tells_why: bool = False
) -> APIRouter:
    """Routes that say whether this process lives, and whether a request sent now would be served.

    Live: the engine made a step, or none was needed. An engine that is being restarted needs nobody else's help; one
    that hangs and cannot be killed does. `tells_why` adds the engine's last words, which are for operators, to `ready`.
    """
    router = APIRouter()

    unwell: Responses = {503: {"model": HealthDocument, "description": "Not so."}}

    @router.get("/health/live", tags=["health"], response_model=HealthDocument, responses=unwell)
    async def live() -> Response:
        """Whether this process lives: restart it where it does not."""
        is_live = engine.is_live
        return json_response({"status": "live" if is_live else "not live"}, 200 if is_live else 503)

    @router.get("/health/ready", tags=["health"], response_model=HealthDocument, responses=unwell)
    async def ready() -> Response:
        """Whether a request sent now would be served."""
        checks = {"engine": engine.is_ready, "database": await _answers(database, executor)}
        is_ready = all(checks.values())
        body = {"status": "ready" if is_ready else "not ready", **checks}
        if tells_why and engine.trouble is not None:
            body["reason"] = engine.trouble
        return json_response(body, 200 if is_ready else 503)

    return router


async def _answers(database: Database, executor: Executor) -> bool:
    try:
        await asyncio.wait_for(call_on(executor, _ping, database), DATABASE_WAIT_S)
    except (SQLAlchemyError, TimeoutError):
        return False
    return True


def _ping(database: Database) -> None:
    with database.read() as connection:
        connection.execute(select(1))

"""`/health/live`, `/health/ready` and the latter's other names, on both listeners and without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NotRequired

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response
from typing_extensions import TypedDict

from loramux.migrations.database import Database
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.openapi import Responses

DATABASE_WAIT_S = 2.0

READY_PATHS = ("/health/ready", "/health", "/ping")
"""Paths of the check whether a server is ready: our own, vLLM's and SGLang's, and SageMaker's."""

HEALTH_PATHS = frozenset({"/health/live", *READY_PATHS})


class HealthDocument(TypedDict):
    """All calls except `/health/live` add `engine` and `database`. If one of them is not ready, the admin listener also
    adds a `reason`.
    """

    status: str
    engine: NotRequired[bool]
    database: NotRequired[bool]
    reason: NotRequired[str]


def health_router(
    database: Database,
    engine: EngineClient,
    trouble: Callable[[], str | None] = lambda: None,
    *,
    tells_why: bool = False,
) -> APIRouter:
    """Routes that report whether this process is live, and whether it is ready to serve requests.

    Live means that the engine is making progress or is idle. While the engine restarts, the process also counts as
    live. It is not live from the time that the engine hangs until the engine's process is gone. Ready means that the
    engine is running, the database answers, and the gateway knows of no `trouble` with the database, such as rejected
    writes. `tells_why` adds the reasons to `ready`, for operators.
    """
    router = APIRouter()
    ping = _Ping(database)

    unwell: Responses = {503: {"model": HealthDocument, "description": "Not live or not ready."}}

    @router.get("/health/live", tags=["health"], response_model=HealthDocument, responses=unwell)
    async def live() -> Response:
        """Check whether this process is live. If it is not live, restart it."""
        is_live = engine.is_live
        return json_response({"status": "live" if is_live else "not live"}, 200 if is_live else 503)

    async def ready() -> Response:
        """Check whether a request sent now would be served."""
        known = trouble()
        # The ping only reads, so it would also succeed if the database rejects writes.
        checks = {"engine": engine.is_ready, "database": known is None and await ping.is_answered()}
        is_ready = all(checks.values())
        body = {"status": "ready" if is_ready else "not ready", **checks}
        reasons = [reason for reason in (engine.trouble, known) if reason is not None]
        if tells_why and reasons:
            body["reason"] = "; ".join(reasons)
        return json_response(body, 200 if is_ready else 503)

    for path in READY_PATHS:
        name = path.rpartition("/")[2]
        router.add_api_route(
            path, ready, name=name, tags=["health"], response_model=HealthDocument, responses={**unwell}
        )
    # Some load balancers and uptime checks send HEAD.
    for path, check in {"/health/live": live, **dict.fromkeys(READY_PATHS, ready)}.items():
        router.add_api_route(path, check, methods=["HEAD"], include_in_schema=False)
    return router


class _Ping:
    """Pings the database, one ping at a time, so that an unresponsive database occupies only one thread.

    It runs on asyncio's default thread pool, not on the pool that serves calls, so a flood of calls does not make the
    server look unhealthy.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asking: asyncio.Future[None] | None = None

    async def is_answered(self) -> bool:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(_ping, self._database))
        # Waiting callers see a failure. Retrieve the exception here too, so that asyncio does not report it if nobody
        # waits.
        self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        try:
            async with asyncio.timeout(DATABASE_WAIT_S):
                await asyncio.shield(self._asking)
        except (SQLAlchemyError, TimeoutError):
            return False
        return True


def _ping(database: Database) -> None:
    with database.read() as connection:
        connection.execute(select(1))

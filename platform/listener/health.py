"""`/health/live`, `/health/ready` and the latter's other names, on both listeners and without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired

from fastapi import APIRouter, FastAPI, Request
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
    """All calls except `/health/live` add `engine` and `database`. If one of them is not ready, or the server is
    stopping, the admin listener also adds a `reason`. For a server with several engines, it adds whether each is ready,
    as `engines`.
    """

    status: str
    engine: NotRequired[bool]
    database: NotRequired[bool]
    engines: NotRequired[dict[str, bool]]
    reason: NotRequired[str]


router = APIRouter(generate_unique_id_function=lambda route: route.name)
"""The routes of every app, built only once. `add_health` adds them and what they check."""

_UNWELL: Responses = {503: {"model": HealthDocument, "description": "Not live or not ready."}}


@router.get("/health/live", tags=["health"], response_model=HealthDocument, responses=_UNWELL)
async def live(request: Request) -> Response:
    """Check whether this process is live. If it is not live, restart it."""
    is_live = _health_of(request).engine.is_live
    return json_response({"status": "live" if is_live else "not live"}, 200 if is_live else 503)


async def ready(request: Request) -> Response:
    """Check whether a request sent now would be served."""
    health = _health_of(request)
    known = health.trouble()
    # The ping only reads, so it would also succeed if the database rejects writes.
    checks = {"engine": health.engine.is_ready, "database": known is None and await health.ping.is_answered()}
    is_ready = all(checks.values()) and not health.is_draining
    body: dict[str, object] = {"status": "ready" if is_ready else "not ready", **checks}
    draining = "the server is stopping" if health.is_draining else None
    reasons = [reason for reason in (*health.troubles(), known, draining) if reason is not None]
    if health.tells_why and health.engines:
        body["engines"] = {name: engine.is_ready for name, engine in health.engines.items()}
    if health.tells_why and reasons:
        body["reason"] = "; ".join(reasons)
    return json_response(body, 200 if is_ready else 503)


for _path in READY_PATHS:
    router.add_api_route(
        _path,
        ready,
        name=_path.rpartition("/")[2],
        tags=["health"],
        response_model=HealthDocument,
        responses={**_UNWELL},
    )
# Some load balancers and uptime checks send HEAD.
for _path, _check in {"/health/live": live, **dict.fromkeys(READY_PATHS, ready)}.items():
    router.add_api_route(_path, _check, methods=["HEAD"], include_in_schema=False)


def add_health(
    app: FastAPI,
    database: Database,
    engine: EngineClient,
    trouble: Callable[[], str | None] = lambda: None,
    *,
    tells_why: bool = False,
    engines: Mapping[str, EngineClient] | None = None,
) -> None:
    """Add routes that report whether this process is live, and whether it is ready to serve requests.

    Live means that the engine is making progress or is idle. While the engine restarts, the process also counts as
    live. It is not live from the time that the engine hangs until the engine's process is gone. Ready means that the
    engine is running, the database answers, and the gateway knows of no `trouble` with the database, such as rejected
    writes. `tells_why` adds the reasons to `ready`, for operators, and the state of each of the `engines` behind
    `engine`. One that is ready is enough.
    """
    app.state.health = _Health(engine, _Ping(database), trouble, tells_why, engines or {})
    app.router.routes.extend(router.routes)


def begin_drain(app: FastAPI) -> None:
    """Let the app report that the server is not ready, because its OpenAI listener accepts no more connections."""
    app.state.health = replace(app.state.health, is_draining=True)


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


@dataclass(frozen=True, slots=True)
class _Health:
    engine: EngineClient
    ping: _Ping
    trouble: Callable[[], str | None]
    tells_why: bool
    engines: Mapping[str, EngineClient]
    is_draining: bool = False

    def troubles(self) -> Sequence[str | None]:
        """Why engines are not ready, as far as it is known."""
        if not self.engines:
            return (self.engine.trouble,)
        return [f"{name}: {engine.trouble}" for name, engine in self.engines.items() if engine.trouble is not None]


def _health_of(request: Request) -> _Health:
    health: _Health = request.app.state.health
    return health


def _ping(database: Database) -> None:
    with database.read() as connection:
        connection.execute(select(1))

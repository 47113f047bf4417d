"""Streams the stored events of responses in the background, from the first event or a later one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive

from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.request_life import disconnected
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.lost_responses import end_if_lost
from loramux.platform.stored_responses.response_store import StoredResponse

POLL_S = 0.5
"""Interval between looks for new events of a response that another server makes, in seconds."""
LOST_CHECK_S = 10.0
"""How long to wait for an event before checking that a server still makes the response, in seconds."""

log = structlog.get_logger(__name__)


async def check_resumable(services: GatewayServices, found: StoredResponse, after: int) -> None:
    """Raise InvalidRequest unless the events after the sequence number `after` can be streamed."""
    if found.num_events is None:
        raise InvalidRequest(
            "only responses with background: true and stream: true can be streamed again",
            param="stream",
            code="unsupported_parameter",
        )
    if after >= found.num_events:
        raise InvalidRequest("no event with this sequence number has been sent", param="starting_after")
    kept = await services.call(services.stored.background.events, found.tenant_id, found.id, after + 1)
    if kept is not None and kept.is_expired:
        raise InvalidRequest(
            "the events of this response are not stored any more: retrieve it without stream",
            param="stream",
            code="events_expired",
        )


async def follow(
    services: GatewayServices, receive: Receive, found: StoredResponse, after: int
) -> AsyncIterator[bytes]:
    """Yield the events after the sequence number `after` until the last one, or until the client leaves.

    Only stored events are sent, so that no event is sent that a resumed stream would not have.
    """
    tenant_id, response_id = found.tenant_id, found.id
    gone = asyncio.create_task(disconnected(receive))
    quiet_s = 0.0
    try:
        with services.stored.changes.watch(response_id) as watch:
            while not gone.done():
                try:
                    kept = await services.call(services.stored.background.events, tenant_id, response_id, after + 1)
                except (SQLAlchemyError, DatabaseTrouble) as error:
                    log.warning("a stream waits for the database", error=repr(error))
                else:
                    if kept is None or kept.is_expired:
                        return
                    after += len(kept.events)
                    if kept.events:
                        quiet_s = 0.0
                        yield b"".join(kept.events)
                    if after + 1 < kept.num_events:
                        continue
                    if kept.is_finished:
                        return
                begun_s = asyncio.get_running_loop().time()
                waiting = asyncio.create_task(watch.wait(POLL_S))
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                quiet_s += asyncio.get_running_loop().time() - begun_s
                if quiet_s > LOST_CHECK_S:
                    quiet_s = 0.0
                    await end_if_lost(services, tenant_id, response_id)
    finally:
        gone.cancel()

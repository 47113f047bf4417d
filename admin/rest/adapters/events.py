"""`/events`: what happens to tenants' adapters and budgets, as a stream of server-sent events and as a list."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, get_args

from fastapi import APIRouter, Header, Query, Response

from loramux.admin.rest.access import Caller, Reader, Services, tenant_filter
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.held_response import HeldResponse
from loramux.admin.rest.listing import IDENTIFIER, ListDocument, Paging, TenantParam, list_document, paged
from loramux.admin.rest.services import AdminServices
from loramux.migrations.events import EventType
from loramux.platform.errors import InvalidRequest
from loramux.platform.events.documents import EventDocument, describe_event
from loramux.platform.events.event_log import MAX_READ, Event, EventFilter
from loramux.platform.requests.openapi import answers_events
from loramux.platform.requests.sse import event as encoded

router = APIRouter(prefix="/events", tags=["events"])

LIFETIME_S = 300.0
"""Longest duration of a stream, in seconds. The client then connects again, and its key is checked again."""
HEARTBEAT_S = 15.0
RETRY_MS = 2000
EXPIRED = "events.expired"
"""Type of the first event of a stream that cannot begin where the client left off. It has no number."""

AdapterParam = Annotated[str | None, Query(pattern=IDENTIFIER, description="Only events of this adapter.")]
TypesParam = Annotated[
    str | None, Query(max_length=400, description="Only these types, separated by commas, such as `alias.moved`.")
]

_NUMBER = re.compile(r"[0-9]{1,18}")
_TYPES = frozenset(get_args(EventType))


@router.get("", response_class=Response, responses=answers_events("alias.moved"))
async def follow_events(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    adapter: AdapterParam = None,
    types: TypesParam = None,
    last_event_id: Annotated[
        str | None, Header(max_length=40, description="Continue after this number instead of with the next event.")
    ] = None,
) -> Response:
    """Follow events. A tenant's key gets its tenant's events, and a platform key those of all tenants, or of `tenant`.

    Each event has a number in the field `id`, which is also its `sequence`. The numbers of a tenant's events have no
    gaps. Platform keys without `tenant` get the numbers among all events. The stream ends after five minutes; send the
    last number as `Last-Event-ID` to continue.
    """
    wanted = await _wanted(services, caller, tenant, adapter, types)
    if last_event_id is not None and not _NUMBER.fullmatch(last_event_id):
        raise InvalidRequest("Last-Event-ID must be the number of an event", param="last-event-id")
    release_slot = await services.slots.event_streams.acquire_slot(caller.principal.holder, rests=False)
    try:
        position = await services.events.feed.head()
        head = await services.call(services.events.log.head, wanted.tenant_id)
    except BaseException:
        release_slot()
        raise
    after = head if last_event_id is None else min(head, int(last_event_id))
    stream = _stream(services, wanted, after, position, is_resumed=last_event_id is not None)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return HeldResponse(stream, release_slot, headers, "text/event-stream")


@router.get("/recent")
@paged
async def list_recent_events(
    services: Services,
    caller: Reader,
    paging: Paging,
    tenant: TenantParam = None,
    adapter: AdapterParam = None,
    types: TypesParam = None,
) -> ListDocument[EventDocument]:
    """List the events that are kept, newest first. The filters, and who sees which events, are those of the stream."""
    wanted = await _wanted(services, caller, tenant, adapter, types)
    await services.events.feed.head()
    page = await services.call(services.events.log.page, wanted, *paging)
    return list_document(page, lambda event: describe_event(event, is_of_tenant=wanted.tenant_id is not None))


async def _wanted(
    services: AdminServices, caller: Caller, tenant: str | None, adapter: str | None, types: str | None
) -> EventFilter:
    tenant_id = await tenant_filter(services, caller, tenant)
    adapter_ids = caller.adapter_ids
    if adapter is not None:
        adapter_ids = frozenset({(await find_adapter(services, caller, adapter)).id})
    return EventFilter(tenant_id=tenant_id, adapter_ids=adapter_ids, types=_parsed_types(types))


def _parsed_types(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    types = frozenset(text.split(","))
    if not types <= _TYPES:
        raise InvalidRequest(f"the types are {', '.join(sorted(_TYPES))}", param="types", code="invalid_types")
    return types


async def _stream(
    services: AdminServices, wanted: EventFilter, after: int, position: int, *, is_resumed: bool
) -> AsyncIterator[bytes]:
    """Yield the events after a number, and heartbeats. `position` is the highest position so far."""
    log, feed, loop = services.events.log, services.events.feed, asyncio.get_running_loop()
    streams = services.metrics.events.streams

    def read_on() -> tuple[list[Event], int]:
        head = log.head(wanted.tenant_id)
        events = log.read(after, wanted)
        numbers = [_number(event, wanted) for event in events]
        # If all were read, events of other types need not be read again.
        return events, max(numbers, default=after) if len(events) == MAX_READ else max([head, *numbers])

    streams.inc()
    try:
        yield f"retry: {RETRY_MS}\nid: {after}\n\n".encode()
        if is_resumed and await services.call(_has_expired, services, wanted, after):
            yield encoded({"object": "event", "type": EXPIRED, "after": after}, EXPIRED)
        told_s = loop.time()
        end_s = told_s + LIFETIME_S
        while loop.time() < end_s:
            events, reached = await services.call(read_on)
            for one in events:
                document = describe_event(one, is_of_tenant=wanted.tenant_id is not None)
                yield f"id: {_number(one, wanted)}\n".encode() + encoded(document, one.type)
            after = reached
            if events:
                told_s = loop.time()
            if len(events) == MAX_READ:
                continue
            # Other tenants' events must not show in this stream, so they neither hasten nor delay its heartbeat.
            position = await feed.wait(position, max(0.0, told_s + HEARTBEAT_S - loop.time()), wanted.tenant_id)
            if loop.time() >= told_s + HEARTBEAT_S:
                # A number without data lets the client continue from here, and shows whether it still listens.
                yield f"id: {after}\n\n".encode()
                told_s = loop.time()
    finally:
        streams.dec()


def _number(event: Event, wanted: EventFilter) -> int:
    return event.position if wanted.tenant_id is None else event.sequence


def _has_expired(services: AdminServices, wanted: EventFilter, after: int) -> bool:
    """Return whether events after a number have been deleted."""
    oldest, head = services.events.log.oldest(wanted.tenant_id), services.events.log.head(wanted.tenant_id)
    return after < head if oldest is None else after + 1 < oldest

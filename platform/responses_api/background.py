"""`background: true`: a response is made without a connection, and its events are stored while it is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import structlog
from fastapi import Request
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from loramux.platform.accounts.principals import Principal
from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.errors import ApiError, InvalidRequest, RateLimited, RequestCancelled
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.plan import Plan
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.requests import sse
from loramux.platform.requests.answers import Document
from loramux.platform.requests.endpoint import Endpoint, Received
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.request_life import planned, reserve, resolve, settle
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.storing import call_storing
from loramux.platform.responses_api.keeping import Keeping, is_stored
from loramux.platform.responses_api.output_items import Event
from loramux.platform.responses_api.response_answer import (
    ResponseAnswer,
    cancelled_response,
    complete_response,
    failed_response,
    numbered,
)
from loramux.platform.responses_api.response_chat import ResponseChat
from loramux.platform.responses_api.response_stream import follow
from loramux.platform.stored_responses.background_store import (
    MAX_RUNNING,
    NewEvents,
    NotAdded,
    TooManyRunning,
    split_events,
)
from loramux.platform.stored_responses.conversation_store import ConversationFull
from loramux.platform.stored_responses.response_store import StoredResponse
from loramux.platform.stored_responses.sealing import ContentTooLong

FLUSH_S = 0.25
"""Shortest interval between two times that the events of a response are stored, in seconds."""
STORE_WAIT_S = 60.0
"""How long to try to store a finished response while the database fails, in seconds."""
RETRY_S = 1.0
TOO_MANY_RETRY_S = 5.0

COMPLETE = ("completed", "incomplete")
"""States of responses that are added to their conversations."""
TROUBLE = (SQLAlchemyError, DatabaseTrouble)
log = structlog.get_logger(__name__)


async def begin_in_background(
    request: Request,
    services: GatewayServices,
    caller: Principal,
    endpoint: Endpoint[ResponseChat],
    received: Received[ResponseChat],
) -> Response:
    """Reserve quota for a response, start it, and return it as it is, or a stream of its events.

    Raises what a request raises before its response starts.
    """
    started_s = time.monotonic()
    target = await resolve(services, caller, received.body.model, received.body.user)
    services.run.gate.check(target.share_in(target.tiers.tier(received.body.service_tier)))
    plan, answer = await planned(services, caller, endpoint, received, target)
    assert isinstance(answer, ResponseAnswer)
    if not is_stored(services, plan.target, received):
        raise InvalidRequest(
            "a response in the background is stored, and this request or your tenant's setting does not allow it",
            param="background",
            code="storage_not_allowed",
        )
    run = BackgroundRun(services, plan, answer, Keeping(services, plan.target, received), received, started_s)
    await run.begin()
    try:
        headers = await reserve(services, plan, received.body)
    except BaseException:
        await asyncio.shield(run.discard())
        raise
    generation = services.run.requests.start(plan, run.live)
    generation.num_kept = 0
    if not received.body.stream:
        return json_response(run.queued.response, headers=headers)
    return sse.EventStream(follow(services, request.receive, run.queued, -1), headers)


class BackgroundRun:
    """One response in the background, from its first row to its settlement."""

    def __init__(
        self,
        services: GatewayServices,
        plan: Plan,
        answer: ResponseAnswer,
        keeping: Keeping,
        received: Received[ResponseChat],
        started_s: float,
    ) -> None:
        self._services = services
        self._answer = answer
        self._keeping = keeping
        self._started_s = started_s
        self._days = plan.target.share.response_days
        self._keeps_events = bool(received.body.stream)
        document, events = answer.queued()
        state = "queued"
        self.queued = replace(keeping.stored(document), state=state, num_events=0 if self._keeps_events else None)
        self._first = 0
        """The sequence number of the first waiting event."""
        self._waiting = split_events(events) if self._keeps_events else []
        self._num_tokens = 0
        """Number of tokens in all events so far."""
        self._has_changed = asyncio.Event()
        self._has_ended = asyncio.Event()

    async def begin(self) -> None:
        """Store the queued response. Raises RateLimited or InvalidRequest."""
        services, events = self._services, self._new_events()
        try:
            await call_storing(services, services.stored.background.begin, self.queued, events, self._days)
        except TooManyRunning:
            raise RateLimited(
                f"your tenant already has {MAX_RUNNING} unfinished responses in the background",
                param="background",
                retry_after_s=TOO_MANY_RETRY_S,
            ) from None
        except ContentTooLong:
            raise InvalidRequest("the request is too long to be stored", param="input", code="too_long") from None
        self._drop(events)

    async def discard(self) -> None:
        """Delete the queued response, whose request was refused."""
        with suppress(*TROUBLE):
            await self._services.call(self._services.stored.responses.delete, self.queued.tenant_id, self.queued.id)

    async def live(self, generation: Generation) -> None:
        """Run the admitted request, store the response, and settle the request."""
        reading = asyncio.create_task(self._read(generation))
        settlement = await generation.run()
        generation.end(settlement)
        charged = settlement
        try:
            charged = await self._finish(generation, settlement, await reading)
        finally:
            await settle(self._services, generation.plan, charged)
            self._services.stored.changes.notify(self.queued.id)

    async def _read(self, generation: Generation) -> ApiError | None:
        """Turn the output into events until it ends. Return the error with which it ended."""
        storing = asyncio.create_task(self._store_progress(generation))
        has_begun = False
        try:
            async for delta in generation.deltas():
                if not has_begun:
                    plan, seconds = generation.plan, self._services.metrics.api.first_token_seconds
                    seconds.labels(plan.endpoint, plan.service_tier).observe(time.monotonic() - self._started_s)
                events = self._answer.events(delta)
                if self._keeps_events:
                    self._waiting += split_events(events)
                    self._num_tokens += len(delta.token_ids)
                if self._keeps_events or not has_begun:
                    self._has_changed.set()
                has_begun = True
        except ApiError as error:
            return error
        finally:
            # A transaction that has begun must end before the next one.
            self._has_ended.set()
            self._has_changed.set()
            await storing
        return None

    async def _store_progress(self, generation: Generation) -> None:
        """Store waiting events until the output ends: the first ones at once, the others in groups."""
        store, response_id = self._services.stored.background, self.queued.id
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            if self._has_ended.is_set():
                return
            events, num_tokens = self._new_events(), self._num_tokens
            try:
                state = await self._services.call(store.progress, self.queued, events, num_tokens)
            except ContentTooLong:
                generation.cancel()
                continue
            except TROUBLE as error:
                log.warning("the events of a response could not be stored; trying again", error=repr(error))
                self._has_changed.set()
                await asyncio.sleep(RETRY_S)
                continue
            if state in ("queued", "in_progress"):
                self._drop(events)
                generation.num_kept = num_tokens
                self._services.stored.changes.notify(response_id)
            else:
                # The tenant has cancelled or deleted the response, perhaps on another server.
                generation.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._has_ended.wait()

    async def _finish(self, generation: Generation, settlement: Settlement, error: ApiError | None) -> Settlement:
        """Store the finished response. Return what to charge: the tokens that the tenant can read, or all tokens if
        the response is complete or if the tenant has ended it.
        """
        document = await self._finished(generation, error)
        stored = replace(self.queued, state=document["status"], response=document)
        try:
            state = await self._complete(stored, settlement)
            if state == "cancelling":
                # The cancellation came too late to save work, but its caller was told that it had succeeded.
                stored = self._ended_otherwise(*cancelled_response(document))
                state = await self._store(stored, settlement)
        except ContentTooLong:
            settlement = self._kept(generation, settlement)
            too_long = ApiError("the response is too long to be stored", code="response_too_long")
            # Events that are not stored were never sent, so their numbers are free.
            del self._waiting[:-1]
            stored = self._ended_otherwise(*failed_response(self.queued.response, too_long))
            state = await self._store(stored, settlement)
        if state in (stored.state, None):
            self._services.metrics.responses.background.labels(stored.state).inc()
            return settlement
        return self._kept(generation, settlement)

    async def _complete(self, stored: StoredResponse, settlement: Settlement) -> str | None:
        """Store a finished response, and add a complete one to its conversation. Both happen, or the response says that
        it is in no conversation. Returns the state in the database. Raises ContentTooLong.
        """
        document = stored.response
        if document["status"] not in COMPLETE or document["conversation"] is None:
            return await self._store(stored, settlement)
        try:
            add = await self._services.call(self._keeping.adding, document)
            return await self._store(stored, settlement, add)
        except (NotAdded, ConversationFull, ContentTooLong) as error:
            log.warning("a response could not be added to its conversation", error=repr(error))
            return await self._store(self._ended_otherwise(*complete_response(document)), settlement)

    def _ended_otherwise(self, document: Document, events: list[Event]) -> StoredResponse:
        """Return the row of another end. Its events replace the last event."""
        if self._keeps_events:
            self._waiting[-1:] = numbered(events, self._first + len(self._waiting) - 1)
        return replace(self.queued, state=document["status"], response=document)

    async def _finished(self, generation: Generation, error: ApiError | None) -> Document:
        """Return the finished response object. Its last events wait to be stored."""
        if error is None and not generation.is_abandoned:
            await self._answer.keep((), generation.usage)
            document = self._answer.whole((), generation.usage)
            self._wait_for(self._answer.end(generation.usage))
            return document
        if isinstance(error, RequestCancelled):
            document, events = self._answer.cancelled(generation.usage)
        else:
            document, events = self._answer.failed(error or ApiError("the server stops", code="server_stopped"))
        self._wait_for(events)
        return document

    async def _store(
        self, stored: StoredResponse, settlement: Settlement, add: Callable[[Connection], bool] | None = None
    ) -> str | None:
        """Store the finished response and the waiting events. Return its state in the database, or None if it has been
        deleted. If the database keeps failing, return the state that it has. Raises ContentTooLong, and with `add` what
        `BackgroundStore.finish` raises.
        """
        end_s = time.monotonic() + STORE_WAIT_S
        store = self._services.stored.background
        while True:
            try:
                events = self._new_events()
                return await self._services.call(store.finish, stored, events, settlement.completion_tokens, add)
            except TROUBLE as error:
                log.warning("a response in the background could not be stored", error=repr(error))
                if time.monotonic() > end_s:
                    return "in_progress"
                await asyncio.sleep(RETRY_S)

    def _kept(self, generation: Generation, settlement: Settlement) -> Settlement:
        kept = min(generation.num_kept or 0, settlement.completion_tokens)
        return replace(settlement, status="failed", completion_tokens=kept)

    def _new_events(self) -> NewEvents:
        return NewEvents(self._first, tuple(self._waiting))

    def _drop(self, stored: NewEvents) -> None:
        del self._waiting[: len(stored.events)]
        self._first += len(stored.events)

    def _wait_for(self, events: bytes) -> None:
        if self._keeps_events:
            self._waiting += split_events(events)

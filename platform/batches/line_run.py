"""Runs one line of a batch like a client's request, and stores its answer before its request is settled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.errors import ClaimLost
from loramux.platform.accounts.principals import Principal
from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.batches.batch_claims import StoredAnswer, WaitingLine
from loramux.platform.batches.output_lines import answered
from loramux.platform.batches.room import Entry, Room
from loramux.platform.errors import ApiError
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.plan import Plan
from loramux.platform.generation.settler import NEVER_RAN
from loramux.platform.ledger.prices import BATCHES
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.openai_api.chat import CHAT
from loramux.platform.openai_api.completions import COMPLETIONS
from loramux.platform.pooling_api.embeddings import EMBEDDING_LINES
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.metrics import METRICS, Kind
from loramux.platform.requests.answers import Answer
from loramux.platform.requests.endpoint import AnyEndpoint, Body, Endpoint, Received
from loramux.platform.requests.error_responses import TRANSLATIONS
from loramux.platform.requests.request_life import planned, reserve, resolve, settle
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.responses import RESPONSES
from loramux.platform.service_tiers import BATCH_RIGHTS

ENDPOINTS: Mapping[str, AnyEndpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDING_LINES,
    "/v1/responses": RESPONSES,
}

LATER = (429, 503)
"""Statuses of requests that wait instead of failing."""

TOKENS_AT_ONCE = 64
"""Number of tokens that the engine sends at once, because nobody reads them before the line has ended."""
STOP_TOKENS_AT_ONCE = 8
"""The same for lines with stop strings, which the gateway must find before the engine has generated much more."""

UNANSWERED = replace(NEVER_RAN, has_begun=True)
"""The settlement of a request without an answer that may have loaded its adapter. It pays only for the load."""

Store = Callable[[WaitingLine, StoredAnswer], Awaitable[None]]
"""Stores an answer. Raises ClaimLost, or SQLAlchemyError or DatabaseTrouble if it may not be stored."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The line has no answer, and can run later. `has_reserved` is True if its request id has been used, and `has_run`
    if a step of the engine included it.
    """

    error: ApiError
    has_reserved: bool
    has_run: bool = False


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line with its content."""

    waiting: WaitingLine
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedLine:
    plan: Plan
    shape: Answer
    body: Body


class LineRuns:
    """Runs the lines of one batch."""

    def __init__(self, services: GatewayServices, room: Room, batch_id: str, endpoint: str, store: Store) -> None:
        self._services = services
        self._room = room
        self._batch_id = batch_id
        self._endpoint = ENDPOINTS[endpoint]
        self._store = store
        self.running: dict[Generation, asyncio.Event] = {}
        """The started lines, each with an event that is set when its answer is stored and settled."""

    async def plan(self, line: ReadLine, caller: Principal) -> PlannedLine | ApiError:
        """Return what `run` needs: the plan of a line that runs as `caller`, or the error that a client would get."""
        try:
            received = self._received(line)
            target = await resolve(self._services, caller, received.body.model, received.body.user)
            target = replace(target, tiers=BATCH_RIGHTS)
            plan, shape = await planned(self._services, caller, self._endpoint, received, target)
        except Exception as error:
            return _told(error)
        tokens_at_once = STOP_TOKENS_AT_ONCE if plan.text_rules.stops else TOKENS_AT_ONCE
        plan = replace(plan, endpoint=BATCHES, priority=0, is_background=True, tokens_at_once=tokens_at_once)
        return PlannedLine(plan, shape, received.body)

    async def run(self, line: ReadLine, found: PlannedLine | ApiError, entry: Entry) -> Refusal | None:
        """Run a line that has entered the room. Return a refusal, or None once its answer is stored and settled.

        Raises ClaimLost, SQLAlchemyError or DatabaseTrouble if the batch cannot continue here.
        """
        has_reserved = False
        try:
            if not isinstance(found, ApiError):
                await reserve(self._services, found.plan, found.body)
        except Exception as error:
            has_reserved = not isinstance(error, ApiError)
            found = _told(error)
        if isinstance(found, ApiError):
            entry.leave()
            if found.status in LATER and not _is_final(found):
                return Refusal(found, has_reserved)
            await self.fail(line, found)
            return None
        return await self._start(line, found, entry)

    def _start(self, line: ReadLine, found: PlannedLine, entry: Entry) -> asyncio.Future[Refusal | None]:
        """Start a line whose quota is reserved. The future's result is that of `run`."""
        done: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()

        async def life(generation: Generation) -> None:
            try:
                result = await self._live(generation, line, found)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)
            finally:
                # After a refusal, the lines that it concerns must wait before another line can enter.
                self._room.remove(generation)
                self.running.pop(generation).set()

        generation = self._services.run.requests.start(found.plan, life)
        self._room.add(generation)
        self.running[generation] = asyncio.Event()
        entry.leave()
        return done

    async def fail(self, line: ReadLine, error: ApiError) -> None:
        """Store an error as the line's answer, without a request."""
        await self._store(line.waiting, self._answer(line, error.status, error.envelope(), None))

    async def _live(self, generation: Generation, line: ReadLine, found: PlannedLine) -> Refusal | None:
        """Run an admitted request, store the answer, and settle.

        An answer that is not stored is not charged. If the database may or may not have stored it, the reservation
        stays open until a server continues the batch and finds out. If the claim is lost and the database fails at that
        moment, what the request has stored for the tenant stays until it expires.
        """
        services, plan, asked = self._services, generation.plan, found.body
        settlement = await generation.run()
        generation.end(settlement)
        refusal, charged = None, settlement
        try:
            status, body = await _collected(services, asked, generation, self._endpoint, found.shape)
            # The next line can run while this answer is stored. Long answers keep their room: few fit in memory.
            if not asked.has_long_answer:
                self._room.remove(generation)
            make = partial(self._answer, line, status, body, settlement)
            answer = await services.compute(make) if asked.has_long_answer else make()
            await self._store(line.waiting, answer)
        except ApiError as error:
            refusal = Refusal(error, has_reserved=True, has_run=generation.was_in_step)
            has_begun = refusal.has_run or error.code == "adapter_unavailable"
            charged = UNANSWERED if has_begun else NEVER_RAN
        except ClaimLost:
            with suppress(SQLAlchemyError, DatabaseTrouble):
                await services.call(services.stored.forget, plan.target.tenant_id, plan.request_id)
            await settle(services, plan, UNANSWERED)
            raise
        await settle(services, plan, charged)
        return refusal

    def _answer(self, line: ReadLine, status: int, body: dict[str, Any], usage: Settlement | None) -> StoredAnswer:
        waiting = line.waiting
        content = answered(waiting.line, self._batch_id, line.custom_id, waiting.request_id, status, body)
        return StoredAnswer(status, content, usage)

    def _received(self, line: ReadLine) -> Received[Any]:
        body = self._endpoint.parse(line.body)
        body.check()
        settings = self._services.settings
        body = body.shown_as(with_usage=settings.forces_usage, by_token_id=settings.names_tokens_by_id)
        return Received(line.waiting.request_id, body, line.waiting.num_bytes)


async def _collected(
    services: GatewayServices, body: Body, generation: Generation, endpoint: AnyEndpoint, shape: Answer
) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an ended request. Raises ApiError if the line can run again."""
    try:
        deltas = [delta async for delta in generation.deltas()]
    except ApiError as error:
        if error.status in LATER:
            raise
        return error.status, error.envelope()
    if generation.is_abandoned:
        raise ApiError("the server stops")
    if isinstance(endpoint, Endpoint) and endpoint.keep is not None:
        await endpoint.keep(shape, deltas, generation.usage)
    if body.has_long_answer:
        return 200, await services.compute(shape.whole, deltas, generation.usage)
    return 200, shape.whole(deltas, generation.usage)


def _is_final(error: ApiError) -> bool:
    """True if a limit of 0, or a limit on what is stored, refused the request. Waiting does not help."""
    if not isinstance(error, QuotaExceeded):
        return False
    return error.policy.limit == 0 or METRICS[error.policy.metric].kind is Kind.STOCK


def _told(error: Exception) -> ApiError:
    """The error that a client would get. Raises any error that no client would get."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind in TRANSLATIONS:
            return TRANSLATIONS[kind](error)
    raise error


TROUBLE = (SQLAlchemyError, DatabaseTrouble)

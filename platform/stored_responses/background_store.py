"""Stores responses in the background while they are made, and the events of their streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, exists, func, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.stored_responses.response_store import (
    DAY_US,
    START_GRACE_US,
    UNFINISHED,
    StoredResponse,
    insert_response,
    is_request_lost,
    request_id_of,
    sealed_content,
)
from loramux.platform.stored_responses.sealing import Sealing

MAX_RUNNING = 64
"""Maximum number of a tenant's unfinished responses in the background."""
EVENTS_KEPT_US = DAY_US
"""How long the events of a stream are kept, in microseconds. No tenant's responses expire sooner."""
_READ_AT_ONCE = 64

_responses, _events, _reservations = schema.responses, schema.response_events, schema.reservations


class TooManyRunning(Exception):
    """The tenant already has MAX_RUNNING unfinished responses in the background."""


class NotAdded(Exception):
    """The response's conversation has been deleted."""


@dataclass(frozen=True, slots=True)
class NewEvents:
    """Encoded events, of which the first has the sequence number `first`."""

    first: int
    events: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """Some of the events from a sequence number on. `is_finished` is True if there will be no more than `num_events`.

    `is_expired` is True if the next event is no longer stored.
    """

    events: Sequence[bytes]
    num_events: int
    is_finished: bool
    is_expired: bool


class BackgroundStore:
    """Blocking.

    queued -> in_progress -> completed, incomplete or failed; or cancelling -> cancelled or failed. The tokens of stored
    events are also the checkpoint of the request, so that exactly these are charged if the server dies.
    """

    def __init__(self, database: Database, sealing: Sealing) -> None:
        self._database = database
        self._sealing = sealing

    def begin(self, stored: StoredResponse, events: NewEvents, days: int) -> None:
        """Store a queued response. Raises TooManyRunning, ContentTooLong or QuotaExceeded."""
        content = sealed_content(self._sealing, stored)
        tenants = schema.tenants
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            # The lock makes the requests of a tenant count each other.
            locked = select(tenants.c.id).where(tenants.c.id == stored.tenant_id)
            connection.execute(locked.with_for_update(key_share=True))
            is_open = exists().where(
                _reservations.c.id == func.replace(_responses.c.id, "resp_", "req_"), _reservations.c.state == "open"
            )
            running = select(func.count()).where(
                _responses.c.tenant_id == stored.tenant_id,
                _responses.c.background_state.in_(UNFINISHED),
                is_open | (_responses.c.created_us >= now_us - START_GRACE_US),
            )
            if connection.execute(running).scalar_one() >= MAX_RUNNING:
                raise TooManyRunning
            insert_response(connection, stored, content, now_us, days)
            self._add(connection, stored.tenant_id, stored.id, stored.num_events, events, now_us)

    def progress(self, stored: StoredResponse, events: NewEvents, num_tokens: int) -> str | None:
        """Store events, if the response keeps them, and the number of tokens in all its events. Return its state, or
        None if it has been deleted.
        """
        with self._database.write() as connection:
            row = self._locked(connection, stored)
            if row is None or row.background_state not in UNFINISHED:
                return None if row is None else str(row.background_state)
            now_us = self._database.now_us(connection)
            self._add(connection, stored.tenant_id, stored.id, row.num_events, events, now_us)
            state = "in_progress" if row.background_state == "queued" else row.background_state
            connection.execute(update(_responses).where(_responses.c.id == stored.id).values(background_state=state))
            self._checkpoint(connection, stored.id, num_tokens)
            return str(state)

    def finish(
        self,
        stored: StoredResponse,
        events: NewEvents,
        num_tokens: int | None,
        add: Callable[[Connection], bool] | None = None,
    ) -> str | None:
        """Store a finished response with the rest of its events. `stored.state` becomes its state.

        `add` adds the response to its conversation, in the same transaction. If it returns False or raises an error,
        nothing is stored.

        Return its state, which is another one if it was finished before or must be cancelled, or None if it has been
        deleted. `num_tokens`
        is what the request is charged. If it is None, nothing changes unless the response is lost.
        Raises ContentTooLong, NotAdded if `add` returns False, or what it raises.
        """
        content = sealed_content(self._sealing, stored)
        with self._database.write() as connection:
            row = self._locked(connection, stored)
            if row is None or row.background_state not in UNFINISHED:
                return None if row is None else str(row.background_state)
            if row.background_state == "cancelling" and stored.state in ("completed", "incomplete"):
                return "cancelling"
            now_us = self._database.now_us(connection)
            if num_tokens is None and not is_request_lost(connection, row, now_us):
                return str(row.background_state)
            if add is not None and not add(connection):
                raise NotAdded
            self._add(connection, stored.tenant_id, stored.id, row.num_events, events, now_us)
            changed = update(_responses).where(_responses.c.id == stored.id)
            connection.execute(changed.values(background_state=stored.state, content=content))
            if num_tokens is not None:
                self._checkpoint(connection, stored.id, num_tokens)
            return stored.state

    def cancel(self, stored: StoredResponse) -> None:
        """Ask the server that runs the response to end it."""
        table = _reservations
        with self._database.write() as connection:
            unfinished = (_responses.c.id == stored.id, _responses.c.background_state.in_(UNFINISHED))
            connection.execute(update(_responses).where(*unfinished).values(background_state="cancelling"))
            running = (table.c.id == stored.request_id, table.c.state == "open", table.c.cancel_requested_us.is_(None))
            now_us = self._database.now_us(connection)
            connection.execute(update(table).where(*running).values(cancel_requested_us=now_us))

    def events(self, tenant_id: str, response_id: str, first: int) -> StoredEvents | None:
        """Return some events from the sequence number `first` on, or None if the response has been deleted."""
        with self._database.read() as connection:
            columns = (_responses.c.background_state, _responses.c.num_events)
            is_own = (_responses.c.id == response_id, _responses.c.tenant_id == tenant_id)
            row = connection.execute(select(*columns).where(*is_own)).one_or_none()
            if row is None:
                return None
            query = select(_events).where(
                _events.c.response_id == response_id,
                _events.c.end_sequence > first,
                _events.c.expires_us > self._database.now_us(connection),
            )
            chunks = connection.execute(query.order_by(_events.c.end_sequence).limit(_READ_AT_ONCE)).all()
        found: list[bytes] = []
        for chunk in chunks:
            begin = first + len(found)
            if chunk.first_sequence > begin:
                break
            content = self._sealing.open_bytes(tenant_id, f"{response_id} {chunk.first_sequence}", chunk.content)
            if content is None:
                break
            found += split_events(content)[begin - chunk.first_sequence :]
        is_expired = not found and first < row.num_events
        return StoredEvents(found, row.num_events, row.background_state not in UNFINISHED, is_expired)

    def _locked(self, connection: Connection, stored: StoredResponse) -> Row[*tuple[Any, ...]] | None:
        columns = (_responses.c.id, _responses.c.created_us, _responses.c.background_state, _responses.c.num_events)
        query = select(*columns).where(_responses.c.id == stored.id, _responses.c.tenant_id == stored.tenant_id)
        return connection.execute(query.with_for_update(key_share=True)).one_or_none()

    def _add(
        self,
        connection: Connection,
        tenant_id: str,
        response_id: str,
        num_stored: int | None,
        new: NewEvents,
        now_us: int,
    ) -> None:
        """Store those of the new events that are not stored yet."""
        if num_stored is None:
            return
        events = new.events[num_stored - new.first :]
        if not events:
            return
        end = num_stored + len(events)
        sealed = self._sealing.seal(tenant_id, f"{response_id} {num_stored}", b"".join(events))
        connection.execute(
            insert(_events).values(
                response_id=response_id,
                first_sequence=num_stored,
                end_sequence=end,
                expires_us=now_us + EVENTS_KEPT_US,
                content=sealed,
            )
        )
        connection.execute(update(_responses).where(_responses.c.id == response_id).values(num_events=end))

    def _checkpoint(self, connection: Connection, response_id: str, num_tokens: int) -> None:
        table = _reservations
        is_running = (table.c.id == request_id_of(response_id), table.c.state == "open")
        connection.execute(update(table).where(*is_running).values(checkpoint_tokens=num_tokens))


def split_events(encoded: bytes) -> list[bytes]:
    """Split server-sent events. Each has one line of data, without empty lines."""
    return [event + b"\n\n" for event in encoded.split(b"\n\n") if event]

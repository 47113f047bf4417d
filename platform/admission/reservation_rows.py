"""The reservations of one transaction: locked in a fixed order, kept in memory, and written once.

Running requests have rows. Recovered requests keep their rows, because their charges can still be corrected. A settled
request exists only in the ledger.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import ARRAY, Connection, Select, String, any_, bindparam, cast, select

from loramux.migrations import schema
from loramux.migrations.bulk_rows import POSTGRESQL, BulkStatement, Write, text_of
from loramux.migrations.pipeline import pipeline
from loramux.platform.admission.records import RECOVERED, ReservationRequest
from loramux.platform.ledger.entries import RequestRow
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import Charge

LEASE_US = 30_000_000
"""How long a reservation can go without a checkpoint before it is recovered, in microseconds."""


class ReservationRow(RequestRow, frozen=True, gc=False):
    state: str
    prompt_tokens: int
    reserved_tokens: int
    checkpoint_tokens: int
    lease_expires_us: int
    cancel_requested_us: int | None
    charges: tuple[Charge, ...]


class _Extended(msgspec.Struct, frozen=True, gc=False):
    id: str
    reserved_tokens: int
    charges: tuple[Charge, ...]


class _Recovered(msgspec.Struct, frozen=True, gc=False):
    id: str
    state: str = RECOVERED


class _Settled(msgspec.Struct, frozen=True, gc=False):
    id: str


_reservations = schema.reservations
_COLUMNS = tuple(_reservations.c[name] for name in ReservationRow.__struct_fields__)
_OPEN = BulkStatement.insert(_reservations, ReservationRow)
_RECOVER = BulkStatement.update(_reservations, _Recovered, [_reservations.c.id], [_reservations.c.state])
_SETTLE = BulkStatement.delete(_reservations, _Settled, [_reservations.c.id])
_EXTEND = BulkStatement.update(
    _reservations, _Extended, [_reservations.c.id], [_reservations.c.reserved_tokens, _reservations.c.charges]
)
_CHARGES = msgspec.json.Decoder(tuple[Charge, ...])


@functools.cache
def _locked(dialect: str) -> Select[*tuple[Any, ...]]:
    """Select and lock the reservations in the list parameter `ids`. Charges are the last column, as text."""
    columns = [*_COLUMNS[:-1], cast(_reservations.c.charges, String).label("charges")]
    ids = bindparam("ids", type_=ARRAY(String)) if dialect == POSTGRESQL else bindparam("ids", expanding=True)
    of_ids = _reservations.c.id == any_(ids) if dialect == POSTGRESQL else _reservations.c.id.in_(ids)
    return select(*columns).where(of_ids).order_by(_reservations.c.id).with_for_update()


class ReservationRows:
    """Reservations by ID: open ones, and recovered ones that can still be corrected.

    A transaction locks the reservations that it changes before any counter. See `CounterRows`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.known: set[str] = set()
        """The requested ids that have or once had a reservation."""
        self.open: dict[str, ReservationRow] = {}
        self.recovered: dict[str, ReservationRow] = {}
        self.charged: dict[str, Settlement] = {}
        """The usage charged to recovered requests, from their last checkpoints."""
        self._opened: list[ReservationRow] = []
        self._extended: dict[str, _Extended] = {}
        self._recovered: list[_Recovered] = []
        self._settled: list[_Settled] = []

    def read(self, ids: Collection[str]) -> list[ReservationRow]:
        """Lock the reservations with these IDs. Return the reservations that can be changed."""
        dialect = self._connection.dialect
        statement = _locked(dialect.name)
        if dialect.name == POSTGRESQL:
            with pipeline(self._connection) as run:
                result = run(text_of(statement, dialect), {"ids": list(ids)})
            found: Sequence[Sequence[Any]] = result.fetchall()
        else:
            found = self._connection.execute(statement, {"ids": list(ids)}).all()
        for values in found:
            row = ReservationRow(*(*values[:-1], _CHARGES.decode(values[-1])))
            self.known.add(row.id)
            if row.state == "open":
                self.open[row.id] = row
            elif row.state == RECOVERED:
                self.recovered[row.id] = row
        self._read_charged(list(self.recovered))
        self._read_settled([one for one in ids if one not in self.known])
        return [*self.open.values(), *self.recovered.values()]

    def add(self, request: ReservationRequest, charges: tuple[Charge, ...], now_us: int) -> None:
        self._opened.append(
            ReservationRow(
                id=request.request_id,
                tenant_id=request.tenant_id,
                api_key_id=request.api_key_id,
                adapter_version_id=request.adapter_version_id,
                model=request.model,
                endpoint=request.endpoint,
                base=request.base,
                end_user=request.end_user,
                service_tier=request.service_tier,
                created_us=now_us,
                state="open",
                prompt_tokens=request.prompt_tokens,
                reserved_tokens=request.reserved_tokens,
                checkpoint_tokens=0,
                lease_expires_us=now_us + LEASE_US,
                cancel_requested_us=None,
                charges=charges,
            )
        )

    def extend(self, request_id: str, tokens: int, charges: tuple[Charge, ...]) -> None:
        row = self.open[request_id]
        more = _Extended(request_id, row.reserved_tokens + tokens, charges)
        self._extended[request_id] = more
        self.open[request_id] = replace(row, reserved_tokens=more.reserved_tokens, charges=charges)

    def settle(self, request_id: str) -> None:
        (self.open if request_id in self.open else self.recovered).pop(request_id)
        self._settled.append(_Settled(request_id))

    def recover(self, request_id: str) -> None:
        """Mark an open reservation as recovered. A later transaction can still settle it."""
        del self.open[request_id]
        self._recovered.append(_Recovered(request_id))

    def writes(self) -> list[Write]:
        """The SQL statements for all changes, in an order that lets one transaction extend and close the same row."""
        return [
            (_OPEN, self._opened),
            (_EXTEND, list(self._extended.values())),
            (_RECOVER, self._recovered),
            (_SETTLE, self._settled),
        ]

    def _read_charged(self, request_ids: list[str]) -> None:
        events = schema.usage_events
        query = select(events).where(events.c.request_id.in_(request_ids))
        for row in self._connection.execute(query) if request_ids else ():
            self.charged[row.request_id] = Settlement(
                status=row.status,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=row.completion_tokens,
                cached_tokens=row.cached_tokens,
            )

    def _read_settled(self, request_ids: list[str]) -> None:
        """Look up in the ledger which of the requests are already settled.

        Few requests are settled twice. This separate statement runs after the locks are acquired, so it sees what the
        previous holder of the locks committed.
        """
        if request_ids:
            events = schema.usage_events
            query = select(events.c.request_id).where(events.c.request_id.in_(request_ids))
            self.known.update(self._connection.execute(query).scalars())

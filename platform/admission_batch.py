"""One transaction for many admissions: locked in one order, judged in memory in the order of arrival, written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, bindparam, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.ledger_entries import LedgerEntries, adapters_of
from loramux.platform.price_list import PriceReader
from loramux.platform.prices import Price, PriceBook, cost_of
from loramux.platform.quota_check import QuotaExceeded, RequestTooLarge, decide, extend
from loramux.platform.quota_rules import Binding, Demand, Spent
from loramux.platform.quota_state import QuotaState, among
from loramux.platform.reservations import (
    RECOVERED,
    Closing,
    Extension,
    Operation,
    Outcome,
    Reservation,
    ReservationRequest,
    Settlement,
)

LEASE_US = 30_000_000
"""A reservation whose gateway has written no checkpoint for this long is recovered."""

_reservations = schema.reservations

# All statements are built once: putting one together takes longer than SQLite needs to run it.
_CLOSE = (
    update(_reservations)
    .where(_reservations.c.id == bindparam("request_id"))
    .values(state=bindparam("new_state", type_=_reservations.c.state.type))
)
_EXTEND = (
    update(_reservations)
    .where(_reservations.c.id == bindparam("request_id"))
    .values(
        reserved_tokens=bindparam("new_tokens"), charges=bindparam("new_charges", type_=_reservations.c.charges.type)
    )
)


@dataclass(frozen=True, slots=True)
class _Statements:
    """What a batch reads of reservations; the parameter `ids` is a list."""

    charges: Select[*tuple[Any, ...]]
    reservations: Select[*tuple[Any, ...]]


@functools.cache
def _statements(dialect: str) -> _Statements:
    of_ids = among(dialect, _reservations.c.id, "ids")
    return _Statements(
        charges=select(_reservations.c.id, _reservations.c.charges).where(of_ids),
        reservations=select(_reservations).where(of_ids).order_by(_reservations.c.id).with_for_update(),
    )


class AdmissionBatch:
    """The work of one transaction that may write.

    Policies are locked in id order, then reservations, then the counters that tenants inherit: see `QuotaState`.
    """

    def __init__(self, connection: Connection, database: Database, prices: PriceReader) -> None:
        self._connection = connection
        self._database = database
        self._now_us = 0
        self._quotas = QuotaState(connection)
        self._open: dict[str, dict[str, Any]] = {}
        self._recovered: dict[str, dict[str, Any]] = {}
        self._charged: dict[str, Settlement] = {}
        self._known: set[str] = set()
        self._opened: list[dict[str, Any]] = []
        self._extended: dict[str, dict[str, Any]] = {}
        self._closed: list[dict[str, Any]] = []
        self._prices = prices
        self._entries = LedgerEntries(connection, prices)
        self._book = PriceBook((), 0)
        self._adapters: Mapping[str, str] = {}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """The outcome of each; a refused one changes nothing. Raises SQLAlchemyError, and then nothing is changed."""
        requests = [operation for operation in operations if isinstance(operation, ReservationRequest)]
        open_ids = {operation.request_id for operation in operations if not isinstance(operation, ReservationRequest)}
        self._lock(requests, open_ids)
        self._now_us = self._database.now_us(self._connection)
        self._read_counters(requests)
        outcomes = [self._judge(operation) for operation in operations]
        self._write()
        return outcomes

    def _lock(self, requests: Sequence[ReservationRequest], open_ids: Collection[str]) -> None:
        execute, statements = self._connection.execute, _statements(self._connection.dialect.name)
        # The policies that a reservation's charges name never change.
        charged: set[str] = set()
        for row in execute(statements.charges, {"ids": list(open_ids)}) if open_ids else ():
            charged.update(charge["policy_id"] for charge in row.charges)
        subjects = {request.tenant_id for request in requests}
        subjects.update(request.api_key_id for request in requests)
        subjects.update(request.adapter_id for request in requests if request.adapter_id is not None)
        if subjects or charged:
            self._quotas.read_policies(subjects, charged)
        if open_ids:
            rows = execute(statements.reservations, {"ids": list(open_ids)}).mappings().all()
            self._known = {row["id"] for row in rows}
            self._open = {row["id"]: dict(row) for row in rows if row["state"] == "open"}
            self._recovered = {row["id"]: dict(row) for row in rows if row["state"] == RECOVERED}
            self._read_charged(list(self._recovered))

    def _read_charged(self, request_ids: list[str]) -> None:
        """What recovered requests were charged by their last checkpoints."""
        events = schema.usage_events
        query = select(events).where(events.c.request_id.in_(request_ids))
        for row in self._connection.execute(query) if request_ids else ():
            self._charged[row.request_id] = Settlement(
                status=row.status,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=row.completion_tokens,
                cached_tokens=row.cached_tokens,
            )

    def _read_counters(self, requests: Sequence[ReservationRequest]) -> None:
        if not self._quotas.policies:
            return
        self._quotas.read_timezones({request.tenant_id for request in requests})
        wanted: list[Binding] = []
        for request in requests:
            wanted += self._bindings(request)
        for reservation in (*self._open.values(), *self._recovered.values()):
            held = self._quotas.held(reservation["charges"], reservation["tenant_id"])
            wanted += [binding for _, binding in held if binding is not None]
        self._quotas.read_counters(wanted)
        if self._quotas.has_costs:
            self._read_prices(requests)

    def _read_prices(self, requests: Sequence[ReservationRequest]) -> None:
        self._book = self._prices.book(self._connection, self._now_us)
        versions = {request.adapter_version_id for request in requests}
        versions.update(row["adapter_version_id"] for row in (*self._open.values(), *self._recovered.values()))
        self._adapters = adapters_of(self._connection, {version for version in versions if version is not None})

    def _price(self, tenant_id: str, version_id: str | None, admitted_us: int) -> Price | None:
        """What tokens cost a request, as the ledger will have it; None too where no budget is in money."""
        if self._book.is_empty:
            return None
        adapter_id = None if version_id is None else self._adapters.get(version_id)
        return self._book.price_of(tenant_id, adapter_id, admitted_us)

    def _price_of(self, reservation: Mapping[str, Any]) -> Price | None:
        return self._price(reservation["tenant_id"], reservation["adapter_version_id"], reservation["created_us"])

    def _bindings(self, request: ReservationRequest) -> list[Binding]:
        return self._quotas.bindings(request.tenant_id, request.api_key_id, request.adapter_id, self._now_us)

    def _judge(self, operation: Operation) -> Outcome:
        if isinstance(operation, Closing):
            return self._close(operation)
        if isinstance(operation, Extension):
            return self._extend(operation)
        try:
            return self._reserve(operation)
        except (QuotaExceeded, RequestTooLarge) as refusal:
            return refusal

    def _reserve(self, request: ReservationRequest) -> Reservation:
        price = self._price(request.tenant_id, request.adapter_version_id, self._now_us)
        completion = request.reserved_tokens - request.prompt_tokens
        demand = Demand(
            tokens=request.reserved_tokens,
            cost_nanos=cost_of(price, request.prompt_tokens, 0, completion),
        )
        decision = decide(self._bindings(request), self._quotas.counters, demand, self._now_us)
        self._quotas.change(decision.counters.items())
        self._opened.append(
            {
                "id": request.request_id,
                "tenant_id": request.tenant_id,
                "api_key_id": request.api_key_id,
                "adapter_version_id": request.adapter_version_id,
                "model": request.model,
                "endpoint": request.endpoint,
                "base": request.base,
                "end_user": request.end_user,
                "state": "open",
                "prompt_tokens": request.prompt_tokens,
                "reserved_tokens": request.reserved_tokens,
                "charges": [charge.as_json() for charge in decision.charges],
                "checkpoint_tokens": 0,
                "created_us": self._now_us,
                "lease_expires_us": self._now_us + LEASE_US,
            }
        )
        return Reservation(
            request.request_id, request.reserved_tokens, self._now_us, decision.limits, decision.exceeded
        )

    def _extend(self, extension: Extension) -> bool | LookupError:
        reservation = self._open.get(extension.request_id)
        if reservation is None:
            return self._not_open(extension.request_id)
        held = self._quotas.held(reservation["charges"], reservation["tenant_id"])
        cost_nanos = cost_of(self._price_of(reservation), 0, 0, extension.tokens)
        demand = Demand(tokens=extension.tokens, cost_nanos=cost_nanos)
        granted = extend(held, self._quotas.counters, demand, self._now_us)
        if granted is None:
            return False
        counters, charges = granted
        self._quotas.change(counters.items())
        reservation["charges"] = [charge.as_json() for charge in charges]
        reservation["reserved_tokens"] += extension.tokens
        self._extended[extension.request_id] = {
            "request_id": extension.request_id,
            "new_tokens": reservation["reserved_tokens"],
            "new_charges": reservation["charges"],
        }
        return True

    def _not_open(self, request_id: str) -> bool | LookupError:
        return False if request_id in self._known else LookupError(f"there is no reservation {request_id}")

    def _close(self, closing: Closing) -> bool | LookupError:
        reservation = self._open.get(closing.request_id)
        if reservation is None and closing.request_id in self._recovered and closing.state != RECOVERED:
            return self._correct(closing)
        if reservation is None:
            return self._not_open(closing.request_id)
        if closing.lease_expires_us not in (None, reservation["lease_expires_us"]):
            # A gateway that was only slow has extended its lease since.
            return False
        del self._open[closing.request_id]
        settlement = closing.settlement
        spent = _spent(settlement, self._price_of(reservation))
        for charge, binding in self._quotas.held(reservation["charges"], reservation["tenant_id"]):
            # A limit that was lifted meanwhile no longer binds.
            if binding is not None and (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.give_back(binding.current(counter, self._now_us), charge.amount, spent)
                self._quotas.change([(binding.key, counter)])
        self._closed.append({"request_id": reservation["id"], "new_state": closing.state})
        self._entries.charge(reservation, settlement)
        return True

    def _correct(self, closing: Closing) -> bool:
        """Settle a request whose gateway had seemed dead: what it cost beyond, or less than, what it was charged."""
        reservation = self._recovered.pop(closing.request_id)
        charged, truth = self._charged[closing.request_id], closing.settlement
        price = self._price_of(reservation)
        guess, spent = _spent(charged, price), _spent(truth, price)
        for charge, binding in self._quotas.held(reservation["charges"], reservation["tenant_id"]):
            if binding is not None and (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.correct(binding.current(counter, self._now_us), charge.amount, guess, spent)
                self._quotas.change([(binding.key, counter)])
        self._closed.append({"request_id": closing.request_id, "new_state": closing.state})
        self._entries.correct(reservation, charged, truth)
        return True

    def _write(self) -> None:
        execute = self._connection.execute
        self._quotas.write()
        if self._opened:
            execute(insert(_reservations), self._opened)
        if self._extended:
            execute(_EXTEND, list(self._extended.values()))
        if self._closed:
            execute(_CLOSE, self._closed)
        self._entries.write(self._now_us)


def _spent(settlement: Settlement, price: Price | None) -> Spent:
    return Spent(tokens=settlement.tokens, cost_nanos=settlement.cost_nanos(price), has_run=settlement.has_run)

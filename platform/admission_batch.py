"""One transaction for many admissions: locked in one order, judged in memory in the order of arrival, written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ARRAY, Connection, Select, String, any_, bindparam, cast, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.ledger_entries import LedgerEntries, adapters_of
from loramux.platform.policy_book import PolicyReader
from loramux.platform.price_list import PriceReader
from loramux.platform.prices import Price, PriceBook, cost_of
from loramux.platform.quota_check import Charge, QuotaExceeded, RequestTooLarge, decide, extend
from loramux.platform.quota_counters import CounterKey
from loramux.platform.quota_rules import Binding, Demand, Spent
from loramux.platform.quota_state import QuotaState
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
from loramux.platform.row_documents import POSTGRESQL, ManyRows, text_of, write_together

LEASE_US = 30_000_000
"""A reservation whose gateway has written no checkpoint for this long is recovered."""

MAX_ATTEMPTS = 20
"""How often the rules may change under a transaction before it is given up."""

_reservations = schema.reservations
_OPEN = ManyRows.insert(_reservations)
_CLOSE = ManyRows.update(_reservations, [_reservations.c.id], [_reservations.c.state])
_EXTEND = ManyRows.update(
    _reservations, [_reservations.c.id], [_reservations.c.reserved_tokens, _reservations.c.charges]
)
_CHARGES = msgspec.json.Decoder(list[Charge])


@functools.cache
def _locked(dialect: str) -> Select[*tuple[Any, ...]]:
    """Reservations by the list that the parameter `ids` is; their charges as text."""
    columns = [cast(one, String).label(one.name) if one.name == "charges" else one for one in _reservations.c]
    ids = bindparam("ids", type_=ARRAY(String)) if dialect == POSTGRESQL else bindparam("ids", expanding=True)
    of_ids = _reservations.c.id == any_(ids) if dialect == POSTGRESQL else _reservations.c.id.in_(ids)
    return select(*columns).where(of_ids).order_by(_reservations.c.id).with_for_update()


class Uncounted(Exception):
    """Since the counters were locked the rules have changed, or a day has ended, and others are needed besides.

    Nothing was judged. The transaction is begun anew, with the `bindings` whose counters may have to be made.
    """

    def __init__(self, bindings: Sequence[Binding]) -> None:
        super().__init__("the rules changed while they were applied")
        self.bindings = bindings


class AdmissionBatch:
    """The work of one transaction that may write.

    It locks the reservations in the order of their ids and then the counters in that of their keys: see `QuotaState`.
    Rules and prices come from books that are kept between transactions: see `PolicyReader` and `PriceReader`.
    """

    def __init__(self, connection: Connection, database: Database, policies: PolicyReader, prices: PriceReader) -> None:
        self._connection = connection
        self._database = database
        self._policies = policies
        self._rules = policies.book(connection)
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
        self.num_overdrawn = 0
        """Settlements that came after recovery and took a hard limit beyond what it admits."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """The outcome of each; a refused one changes nothing. Raises Uncounted and SQLAlchemyError, and then nothing
        is changed."""
        requests = [operation for operation in operations if isinstance(operation, ReservationRequest)]
        open_ids = {operation.request_id for operation in operations if not isinstance(operation, ReservationRequest)}
        if open_ids:
            self._lock_reservations(open_ids)
        self._lock_counters(requests)
        if self._rules.has_costs:
            self._read_prices(requests)
        outcomes = [self._judge(operation) for operation in operations]
        self._write()
        return outcomes

    def _lock_reservations(self, ids: Collection[str]) -> None:
        dialect = self._connection.dialect
        statement = _locked(dialect.name)
        if dialect.name == POSTGRESQL:
            result = self._connection.exec_driver_sql(text_of(statement, dialect), {"ids": list(ids)})
        else:
            result = self._connection.execute(statement, {"ids": list(ids)})
        rows = result.mappings().all()
        self._known = {row["id"] for row in rows}
        for row in rows:
            if row["state"] in ("open", RECOVERED):
                kept = self._open if row["state"] == "open" else self._recovered
                kept[row["id"]] = {**row, "charges": _CHARGES.decode(row["charges"])}
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

    def _lock_counters(self, requests: Sequence[ReservationRequest]) -> None:
        """Lock what the rules name, and see that they still do."""
        self._read_rules(requests)
        wanted = self._wanted(requests, self._policies.latest_us)
        self._quotas.read({binding.key for binding in wanted}.union(self._held_keys()))
        moment = self._policies.moment(self._connection)
        self._now_us = moment.now_us
        if moment.epoch != self._rules.epoch:
            self._rules = self._policies.renewed(moment.epoch)
            self._read_rules(requests)
        uncounted = [one for one in self._wanted(requests, self._now_us) if one.key not in self._quotas.counters]
        if uncounted:
            raise Uncounted(uncounted)

    def _read_rules(self, requests: Sequence[ReservationRequest]) -> None:
        subjects: set[str] = set()
        for request in requests:
            subjects.add(request.tenant_id)
            subjects.add(request.api_key_id)
            if request.adapter_id is not None:
                subjects.add(request.adapter_id)
        charged = {
            charge.policy_id
            for reservation in (*self._open.values(), *self._recovered.values())
            for charge in reservation["charges"]
        }
        self._rules.read(self._connection, subjects, {request.tenant_id for request in requests}, charged)

    def _wanted(self, requests: Sequence[ReservationRequest], now_us: int) -> list[Binding]:
        return [
            binding
            for request in requests
            for binding in self._rules.bindings(request.tenant_id, request.api_key_id, request.adapter_id, now_us)
        ]

    def _held_keys(self) -> set[CounterKey]:
        """The counters of which reservations hold something."""
        return {
            binding.key
            for reservation in (*self._open.values(), *self._recovered.values())
            for _, binding in self._rules.held(reservation["charges"], reservation["tenant_id"])
            if binding is not None
        }

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

    def _bindings(self, request: ReservationRequest) -> Sequence[Binding]:
        return self._rules.bindings(request.tenant_id, request.api_key_id, request.adapter_id, self._now_us)

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
            loads=int(request.loads_adapter),
        )
        decision = decide(self._bindings(request), self._quotas.counters, demand, self._now_us)
        for key, counter in decision.counters.items():
            self._quotas.change(key, counter)
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
                "charges": decision.charges,
                "checkpoint_tokens": 0,
                "created_us": self._now_us,
                "lease_expires_us": self._now_us + LEASE_US,
                "cancel_requested_us": None,
            }
        )
        return Reservation(
            request.request_id, request.reserved_tokens, self._now_us, decision.limits, decision.exceeded
        )

    def _extend(self, extension: Extension) -> bool | LookupError:
        reservation = self._open.get(extension.request_id)
        if reservation is None:
            return self._not_open(extension.request_id)
        held = self._rules.held(reservation["charges"], reservation["tenant_id"])
        cost_nanos = cost_of(self._price_of(reservation), 0, 0, extension.tokens)
        demand = Demand(tokens=extension.tokens, cost_nanos=cost_nanos)
        granted = extend(held, self._quotas.counters, demand, self._now_us)
        if granted is None:
            return False
        counters, charges = granted
        for key, counter in counters.items():
            self._quotas.change(key, counter)
        reservation["charges"] = charges
        reservation["reserved_tokens"] += extension.tokens
        self._extended[extension.request_id] = {
            "id": extension.request_id,
            "reserved_tokens": reservation["reserved_tokens"],
            "charges": reservation["charges"],
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
        for charge, binding in self._rules.held(reservation["charges"], reservation["tenant_id"]):
            # A limit that was lifted meanwhile no longer binds.
            if binding is not None and (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.give_back(binding.current(counter, self._now_us), charge.amount, spent)
                self._quotas.change(binding.key, counter)
        self._closed.append({"id": reservation["id"], "state": closing.state})
        self._entries.charge(reservation, settlement)
        return True

    def _correct(self, closing: Closing) -> bool:
        """Settle a request whose gateway had seemed dead: what it cost beyond, or less than, what it was charged."""
        reservation = self._recovered.pop(closing.request_id)
        charged, truth = self._charged[closing.request_id], closing.settlement
        price = self._price_of(reservation)
        guess, spent = _spent(charged, price), _spent(truth, price)
        is_overdrawn = False
        for charge, binding in self._rules.held(reservation["charges"], reservation["tenant_id"]):
            if binding is not None and (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.correct(binding.current(counter, self._now_us), charge.amount, guess, spent)
                self._quotas.change(binding.key, counter)
                is_more = spent.of(binding.metric) > guess.of(binding.metric)
                is_overdrawn |= is_more and binding.is_hard and binding.is_overdrawn(counter)
        self.num_overdrawn += is_overdrawn
        self._closed.append({"id": closing.request_id, "state": closing.state})
        self._entries.correct(reservation, charged, truth)
        return True

    def _write(self) -> None:
        # Apart from the others: one that is extended and closed at once is the same row twice.
        _EXTEND.run(self._connection, list(self._extended.values()))
        entries = self._entries.writes(self._now_us)
        write_together(
            self._connection, [self._quotas.writes(), (_OPEN, self._opened), (_CLOSE, self._closed), *entries]
        )


def _spent(settlement: Settlement, price: Price | None) -> Spent:
    return Spent(
        tokens=settlement.tokens,
        cost_nanos=settlement.cost_nanos(price),
        has_run=settlement.has_run,
        has_begun=settlement.has_begun,
    )

"""One transaction for many operations: locks rows in a fixed order, checks operations in order of arrival, and writes
once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection

from loramux.migrations.bulk_rows import write_together
from loramux.migrations.database import Database
from loramux.platform.admission.records import (
    Closing,
    Extension,
    LoadCharge,
    Operation,
    Outcome,
    Reservation,
    ReservationRequest,
)
from loramux.platform.admission.reservation_rows import ReservationRow, ReservationRows
from loramux.platform.ledger.entries import LedgerEntries, adapters_of, priced_adapter
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.prices import BATCHES, Price, PriceBook, rate_of
from loramux.platform.quotas.counter_rows import CounterRows
from loramux.platform.quotas.counters import CounterKey
from loramux.platform.quotas.decisions import Decision, QuotaExceeded, RequestTooLarge, decide, extend
from loramux.platform.quotas.demand import ONE_LOAD, PricedDemand, Spent
from loramux.platform.quotas.metrics import Unit
from loramux.platform.quotas.policy_cache import PolicyReader
from loramux.platform.quotas.rules import Binding

_Caller = tuple[str, str, str | None, bool]
"""The IDs of the tenant, the key and the adapter, and whether a batch asks. The adapter is None for the base."""

MAX_ATTEMPTS = 20
"""Maximum number of attempts at a transaction while quota policies keep changing."""


class CountersMissing(Exception):
    """Policies changed or a window rolled over after the counters were locked. Retry with these bindings locked too.

    No operation was applied. The counters of `bindings` may have to be created before the retry.
    """

    def __init__(self, bindings: Sequence[Binding]) -> None:
        super().__init__("quota policies changed while they were applied")
        self.bindings = bindings


class AdmissionTransaction:
    """The work of one write transaction.

    It locks reservations in the order of their IDs, then counters in the order of their keys. See `CounterRows`.
    `PolicyReader` and `PriceReader` cache rules and prices between transactions.
    """

    def __init__(self, connection: Connection, database: Database, policies: PolicyReader, prices: PriceReader) -> None:
        self._connection = connection
        self._database = database
        self._policies = policies
        self._prices = prices
        self._rules = policies.cache(connection)
        self._now_us = 0
        self._quotas = CounterRows(connection)
        self._reservations = ReservationRows(connection)
        self._entries = LedgerEntries(connection, prices)
        self._bindings: dict[_Caller, Sequence[Binding]] = {}
        """The bindings that apply to each caller with a request or load charge."""
        self._held: dict[str, list[Binding | None]] = {}
        """The bindings of each reservation's charges, by reservation ID. A binding is None if its limit has since been
        removed.
        """
        self._book = PriceBook((), 0)
        self._adapters: Mapping[str, str] = {}
        self.num_overdrawn = 0
        """Number of late settlements of recovered requests that overdrew a hard limit."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply the operations and return the outcome of each. A refused operation charges nothing.

        If CountersMissing or SQLAlchemyError is raised, nothing has changed.
        """
        asking = [operation for operation in operations if isinstance(operation, ReservationRequest | LoadCharge)]
        others = [operation for operation in operations if isinstance(operation, Extension | Closing)]
        rows = self._reservations.read({operation.request_id for operation in others}) if others else []
        callers = {_caller(operation) for operation in asking}
        self._lock_counters(callers, rows, others)
        if self._rules.has_costs:
            self._read_prices([one for one in asking if isinstance(one, ReservationRequest)], rows)
        outcomes = [self._judge(operation) for operation in operations]
        self._write()
        return outcomes

    def _lock_counters(
        self, callers: Collection[_Caller], rows: Sequence[ReservationRow], others: Sequence[Extension | Closing]
    ) -> None:
        """Lock the counters that the operations check or change.

        If the policies changed before the counters were locked, the new policies apply. Raises CountersMissing if they
        need a counter that is not locked.
        """
        self._read_rules(callers, rows)
        wanted = self._bind(callers, self._policies.latest_us)
        keys = {binding.key for binding in wanted}.union(self._changed_keys(others))
        moment = self._quotas.read_at(keys, self._database)
        self._now_us = moment.now_us
        rules = self._policies.cache_at(moment, self._rules)
        if rules is not self._rules:
            self._rules = rules
            self._read_rules(callers, rows)
        uncounted = [one for one in self._bind(callers, self._now_us) if one.key not in self._quotas.counters]
        if uncounted:
            raise CountersMissing(uncounted)

    def _read_rules(self, callers: Collection[_Caller], rows: Sequence[ReservationRow]) -> None:
        subjects = {subject for caller in callers for subject in caller[:3] if subject is not None}
        charged = {charge.policy_id for row in rows for charge in row.charges}
        self._rules.read(self._connection, subjects, {caller[0] for caller in callers}, charged)
        self._held = {row.id: self._rules.held(row.charges, row.tenant_id) for row in rows}

    def _bind(self, callers: Collection[_Caller], now_us: int) -> list[Binding]:
        self._bindings = {caller: self._rules.bindings(*caller, now_us) for caller in callers}
        return [binding for bindings in self._bindings.values() for binding in bindings]

    def _changed_keys(self, operations: Sequence[Extension | Closing]) -> set[CounterKey]:
        return {
            binding.key
            for operation in operations
            for binding in self._held.get(operation.request_id, ())
            if binding is not None and _is_changed(binding, operation)
        }

    def _read_prices(self, requests: Sequence[ReservationRequest], rows: Sequence[ReservationRow]) -> None:
        self._book = self._prices.book(self._connection, self._now_us)
        versions = {one.adapter_version_id for one in requests} | {row.adapter_version_id for row in rows}
        self._adapters = adapters_of(self._connection, {version for version in versions if version is not None})

    def _price(self, tenant_id: str, version_id: str | None, admitted_us: int, rate: str) -> Price | None:
        """The price that the ledger will use for a request. None if there is no price or no budget in money."""
        adapter_id = priced_adapter(version_id, self._adapters)
        return self._book.price_of(tenant_id, adapter_id, admitted_us, rate)

    def _price_of(self, reservation: ReservationRow) -> Price | None:
        version_id, created_us = reservation.adapter_version_id, reservation.created_us
        rate = rate_of(reservation.endpoint, reservation.service_tier)
        return self._price(reservation.tenant_id, version_id, created_us, rate)

    def _judge(self, operation: Operation) -> Outcome:
        if isinstance(operation, Closing):
            return self._close(operation)
        if isinstance(operation, Extension):
            return self._extend(operation)
        try:
            return self._load(operation) if isinstance(operation, LoadCharge) else self._reserve(operation)
        except (QuotaExceeded, RequestTooLarge) as refusal:
            return refusal

    def _reserve(self, request: ReservationRequest) -> Reservation:
        rate = rate_of(request.endpoint, request.service_tier)
        price = self._price(request.tenant_id, request.adapter_version_id, self._now_us, rate)
        completion_tokens = request.reserved_tokens - request.prompt_tokens
        loads = int(request.loads_adapter)
        demand = PricedDemand.of_request(price, request.prompt_tokens, completion_tokens, request.num_sequences, loads)
        decision = self._admit(self._bindings[_caller(request)], demand)
        self._reservations.add(request, decision.charges, self._now_us)
        return Reservation(
            request.request_id, request.reserved_tokens, self._now_us, decision.limits, decision.exceeded
        )

    def _load(self, charge: LoadCharge) -> bool:
        bindings = [binding for binding in self._bindings[_caller(charge)] if binding.metric.unit is Unit.LOADS]
        self._admit(bindings, ONE_LOAD)
        return True

    def _admit(self, bindings: Sequence[Binding], demand: PricedDemand) -> Decision:
        """Check a demand against the bindings and charge it. Raises QuotaExceeded or RequestTooLarge."""
        try:
            decision = decide(bindings, self._quotas.counters, demand, self._now_us)
        except (QuotaExceeded, RequestTooLarge):
            self._note_step_back(bindings)
            raise
        for key, counter in decision.counters.items():
            self._quotas.change(key, counter)
        return decision

    def _note_step_back(self, bindings: Sequence[Binding]) -> None:
        """If the clock was set back, let the buckets of a refused request refill from now.

        A refusal changes nothing else. Without this write, every refusal would find the refill time in the future.
        """
        for binding in bindings:
            counter = self._quotas.counters.get(binding.key)
            if counter is None:
                continue
            current = binding.current(counter, self._now_us)
            if current.refilled_us < counter.refilled_us:
                self._quotas.change(binding.key, current)

    def _extend(self, extension: Extension) -> bool | LookupError:
        reservation = self._reservations.open.get(extension.request_id)
        if reservation is None:
            return self._not_open(extension.request_id)
        held = list(zip(reservation.charges, self._held[reservation.id], strict=True))
        demand = PricedDemand.of_extension(self._price_of(reservation), extension.tokens)
        granted = extend(held, self._quotas.counters, demand, self._now_us)
        if granted is None:
            self._note_step_back([binding for _, binding in held if binding is not None])
            return False
        counters, charges = granted
        for key, counter in counters.items():
            self._quotas.change(key, counter)
        self._reservations.extend(extension.request_id, extension.tokens, charges)
        return True

    def _not_open(self, request_id: str) -> bool | LookupError:
        return False if request_id in self._reservations.known else LookupError(f"there is no reservation {request_id}")

    def _close(self, closing: Closing) -> bool | LookupError:
        reservation = self._reservations.open.get(closing.request_id)
        if reservation is None and closing.request_id in self._reservations.recovered and not closing.is_recovery:
            return self._correct(closing)
        if reservation is None:
            return self._not_open(closing.request_id)
        if closing.is_recovery and closing.lease_expires_us != reservation.lease_expires_us:
            # The gateway was only slow and has since extended its lease.
            return False
        settlement = closing.settlement
        spent = Spent.by(settlement, self._price_of(reservation))
        for charge, binding in zip(reservation.charges, self._held[reservation.id], strict=True):
            # A limit that has since been removed no longer applies.
            if binding is None or not binding.is_settled_by(spent):
                continue
            if (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.give_back(binding.current(counter, self._now_us), charge.amount, spent)
                self._quotas.change(binding.key, counter)
        if closing.is_recovery:
            self._reservations.recover(closing.request_id)
        else:
            self._reservations.settle(closing.request_id)
        self._entries.charge(reservation, settlement)
        return True

    def _correct(self, closing: Closing) -> bool:
        """Settle a recovered request: charge the difference between its actual and charged usage."""
        reservation = self._reservations.recovered[closing.request_id]
        charged, truth = self._reservations.charged[closing.request_id], closing.settlement
        price = self._price_of(reservation)
        guess, spent = Spent.by(charged, price), Spent.by(truth, price)
        is_overdrawn = False
        for charge, binding in zip(reservation.charges, self._held[reservation.id], strict=True):
            if binding is None or not binding.is_settled_by(spent):
                continue
            if (counter := self._quotas.counters.get(binding.key)) is not None:
                counter = binding.correct(binding.current(counter, self._now_us), charge.amount, guess, spent)
                self._quotas.change(binding.key, counter)
                is_more = spent.of(binding.metric) > guess.of(binding.metric)
                is_overdrawn |= is_more and binding.is_hard and binding.is_overdrawn(counter)
        self.num_overdrawn += is_overdrawn
        self._reservations.settle(closing.request_id)
        self._entries.correct(reservation, charged, truth)
        return True

    def _write(self) -> None:
        entries = self._entries.writes(self._now_us)
        writes = [self._quotas.writes(), *self._reservations.writes(), *entries]
        write_together(self._connection, writes, is_last=True)


def _is_changed(binding: Binding, operation: Extension | Closing) -> bool:
    if isinstance(operation, Extension):
        return binding.is_extended
    return binding.is_settled_by(Spent.by(operation.settlement, None))


def _caller(asking: ReservationRequest | LoadCharge) -> _Caller:
    is_batch = isinstance(asking, ReservationRequest) and asking.endpoint == BATCHES
    return asking.tenant_id, asking.api_key_id, asking.adapter_id, is_batch

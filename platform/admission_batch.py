"""One transaction for many admissions: locked in one order, judged in memory in the order of arrival, written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ARRAY, Column, ColumnElement, Connection, Select, String, any_, bindparam, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.buckets import Bucket
from loramux.platform.ledger_entries import LedgerEntries
from loramux.platform.price_list import PriceReader
from loramux.platform.quota_check import Charge, QuotaExceeded, RequestTooLarge, correct, decide, extend, give_back
from loramux.platform.quotas import QuotaPolicy, policy_of
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

_reservations, _counters, _policies = schema.reservations, schema.quota_counters, schema.quota_policies

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
_WRITE_BUCKET = (
    update(_counters)
    .where(_counters.c.policy_id == bindparam("policy"), _counters.c.window_start_us == 0)
    .values(level=bindparam("new_level"), reserved=bindparam("new_reserved"), refilled_us=bindparam("new_refilled_us"))
)


@dataclass(frozen=True, slots=True)
class _Statements:
    """What a batch reads. Parameters are lists: `ids`, and `tenant_ids` for policies."""

    charges: Select[*tuple[Any, ...]]
    policies: Select[*tuple[Any, ...]]
    reservations: Select[*tuple[Any, ...]]
    counters: Select[*tuple[Any, ...]]


@functools.cache
def _statements(dialect: str) -> _Statements:
    def among(column: Column[Any], name: str) -> ColumnElement[bool]:
        if dialect == "postgresql":
            # An array is one parameter however long it is, so that the server plans the statement once.
            return column == any_(bindparam(name, type_=ARRAY(String)))
        return column.in_(bindparam(name, expanding=True))

    of_ids = among(_reservations.c.id, "ids")
    wanted = among(_policies.c.tenant_id, "tenant_ids") | among(_policies.c.id, "ids")
    return _Statements(
        charges=select(_reservations.c.id, _reservations.c.charges).where(of_ids),
        policies=select(_policies).where(wanted).order_by(_policies.c.id).with_for_update(),
        reservations=select(_reservations).where(of_ids).order_by(_reservations.c.id).with_for_update(),
        counters=select(_counters).where(among(_counters.c.policy_id, "ids"), _counters.c.window_start_us == 0),
    )


class AdmissionBatch:
    """The work of one transaction that may write.

    Whoever else changes a policy or a counter locks the policy first, and policies are locked in id order; so are
    reservations, after them. What was read under the locks is therefore still true when it is written.
    """

    def __init__(self, connection: Connection, database: Database, prices: PriceReader) -> None:
        self._connection = connection
        self._database = database
        self._now_us = 0
        self._policies: dict[str, QuotaPolicy] = {}
        self._buckets: dict[str, Bucket] = {}
        self._changed: set[str] = set()
        self._open: dict[str, dict[str, Any]] = {}
        self._recovered: dict[str, dict[str, Any]] = {}
        self._charged: dict[str, Settlement] = {}
        self._known: set[str] = set()
        self._opened: list[dict[str, Any]] = []
        self._extended: dict[str, dict[str, Any]] = {}
        self._closed: list[dict[str, Any]] = []
        self._entries = LedgerEntries(connection, prices)

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """The outcome of each; a refused one changes nothing. Raises SQLAlchemyError, and then nothing is changed."""
        tenant_ids = {operation.tenant_id for operation in operations if isinstance(operation, ReservationRequest)}
        open_ids = {operation.request_id for operation in operations if not isinstance(operation, ReservationRequest)}
        self._lock(tenant_ids, open_ids)
        self._now_us = self._database.now_us(self._connection)
        self._read_buckets()
        outcomes = [self._judge(operation) for operation in operations]
        self._write()
        return outcomes

    def _lock(self, tenant_ids: Collection[str], open_ids: Collection[str]) -> None:
        statements, execute = _statements(self._connection.dialect.name), self._connection.execute
        # The policies that a reservation's charges name never change.
        charged: set[str] = set()
        for row in execute(statements.charges, {"ids": list(open_ids)}) if open_ids else ():
            charged.update(charge["policy_id"] for charge in row.charges)
        if tenant_ids or charged:
            wanted = {"tenant_ids": list(tenant_ids), "ids": list(charged)}
            self._policies = {row.id: policy_of(row) for row in execute(statements.policies, wanted)}
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

    def _read_buckets(self) -> None:
        if not self._policies:
            return
        query = _statements(self._connection.dialect.name).counters
        for row in self._connection.execute(query, {"ids": list(self._policies)}):
            self._buckets[row.policy_id] = Bucket(row.level, row.reserved, row.refilled_us)

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
        policies = [policy for policy in self._policies.values() if policy.tenant_id == request.tenant_id]
        decision = decide(policies, self._buckets, request.reserved_tokens, self._now_us)
        self._change(decision.buckets.items())
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
        return Reservation(request.request_id, request.reserved_tokens, self._now_us, decision.limits)

    def _extend(self, extension: Extension) -> bool | LookupError:
        reservation = self._open.get(extension.request_id)
        if reservation is None:
            return self._not_open(extension.request_id)
        charges = [Charge.from_json(charge) for charge in reservation["charges"]]
        granted = extend(self._policies, self._buckets, charges, extension.tokens, self._now_us)
        if granted is None:
            return False
        buckets, held = granted
        self._change(buckets.items())
        reservation["charges"] = [charge.as_json() for charge in held]
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
        for charge in map(Charge.from_json, reservation["charges"]):
            policy = self._policies.get(charge.policy_id)
            # A limit that was lifted meanwhile no longer binds.
            if policy is not None:
                bucket = give_back(policy, self._buckets[policy.id], charge, settlement, self._now_us)
                self._change([(policy.id, bucket)])
        self._closed.append({"request_id": reservation["id"], "new_state": closing.state})
        self._entries.charge(reservation, settlement)
        return True

    def _correct(self, closing: Closing) -> bool:
        """Settle a request whose gateway had seemed dead: what it cost beyond, or less than, what it was charged."""
        reservation = self._recovered.pop(closing.request_id)
        charged, truth = self._charged[closing.request_id], closing.settlement
        for charge in map(Charge.from_json, reservation["charges"]):
            policy = self._policies.get(charge.policy_id)
            if policy is not None:
                bucket = correct(policy, self._buckets[policy.id], charge, charged, truth, self._now_us)
                self._change([(policy.id, bucket)])
        self._closed.append({"request_id": closing.request_id, "new_state": closing.state})
        self._entries.correct(reservation, charged, truth)
        return True

    def _change(self, buckets: Iterable[tuple[str, Bucket]]) -> None:
        for policy_id, bucket in buckets:
            self._buckets[policy_id] = bucket
            self._changed.add(policy_id)

    def _write(self) -> None:
        execute = self._connection.execute
        if self._changed:
            changed = [(policy_id, self._buckets[policy_id]) for policy_id in sorted(self._changed)]
            execute(
                _WRITE_BUCKET,
                [
                    {
                        "policy": policy_id,
                        "new_level": bucket.level,
                        "new_reserved": bucket.reserved,
                        "new_refilled_us": bucket.refilled_us,
                    }
                    for policy_id, bucket in changed
                ],
            )
        if self._opened:
            execute(insert(_reservations), self._opened)
        if self._extended:
            execute(_EXTEND, list(self._extended.values()))
        if self._closed:
            execute(_CLOSE, self._closed)
        self._entries.write(self._now_us)

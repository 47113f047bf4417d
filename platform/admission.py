"""Admission: quota is reserved before a request runs and settled, once, when the truth is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.buckets import Bucket
from loramux.platform.quota_check import Charge, decide, give_back
from loramux.platform.quotas import QuotaPolicy, lock_policies, policy_of
from loramux.platform.reservations import Checkpoint, Reservation, ReservationRequest, Settlement

LEASE_US = 30_000_000
"""A reservation whose gateway has written no checkpoint for this long is recovered."""

RECOVERED = "recovered"
_RECOVER_AT_ONCE = 100


class Admission:
    """Reserve, checkpoint, settle, recover: each one transaction, the same on SQLite and PostgreSQL.

    Policies are locked in id order before the clock and the counters are read, so that what was checked is still
    true when it is written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turn = threading.Lock()

    def reserve(self, request: ReservationRequest) -> Reservation:
        """Take what the request may cost at most; raises QuotaExceeded or RequestTooLarge and then takes nothing."""
        with self._write() as connection:
            policies = lock_policies(connection, request.tenant_id)
            now_us = self._database.now_us(connection)
            buckets = _read_buckets(connection, [policy.id for policy in policies])
            decision = decide(policies, buckets, request.reserved_tokens, now_us)
            for policy_id, bucket in decision.buckets.items():
                _write_bucket(connection, policy_id, bucket)
            connection.execute(
                insert(schema.reservations).values(
                    id=request.request_id,
                    tenant_id=request.tenant_id,
                    api_key_id=request.api_key_id,
                    adapter_version_id=request.adapter_version_id,
                    model=request.model,
                    endpoint=request.endpoint,
                    state="open",
                    prompt_tokens=request.prompt_tokens,
                    reserved_tokens=request.reserved_tokens,
                    charges=[charge.as_json() for charge in decision.charges],
                    checkpoint_tokens=0,
                    created_us=now_us,
                    lease_expires_us=now_us + LEASE_US,
                )
            )
        return Reservation(request.request_id, request.reserved_tokens, now_us, decision.limits)

    def checkpoint(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Note the tokens delivered so far and extend the leases; a reservation that is not open is left alone."""
        table = schema.reservations
        with self._write() as connection:
            lease_expires_us = self._database.now_us(connection) + LEASE_US
            # One order for all gateways, so that two of them never wait for each other.
            for checkpoint in sorted(checkpoints, key=lambda item: item.request_id):
                connection.execute(
                    update(table)
                    .where(table.c.id == checkpoint.request_id, table.c.state == "open")
                    .values(checkpoint_tokens=checkpoint.completion_tokens, lease_expires_us=lease_expires_us)
                )

    def settle(self, request_id: str, settlement: Settlement) -> bool:
        """Charge the truth, release the rest and write the usage event. False: it was settled before."""
        with self._write() as connection:
            return self._close(connection, request_id, "settled", settlement)

    def charged(self, request_id: str) -> Settlement:
        """What a request that is settled or recovered was charged."""
        table = schema.usage_events
        with self._database.read() as connection:
            row = connection.execute(select(table).where(table.c.request_id == request_id)).one()
        return Settlement(
            status=row.status,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            cached_tokens=row.cached_tokens,
            first_token_us=row.first_token_us,
        )

    def recover_expired(self) -> int:
        """Settle reservations whose gateway is gone, at prompt and last checkpoint; how many there were."""
        table = schema.reservations
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            query = select(table).where(table.c.state == "open", table.c.lease_expires_us < now_us)
            expired = connection.execute(query.order_by(table.c.id).limit(_RECOVER_AT_ONCE)).all()
        return sum(self._recover(row) for row in expired)

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if not self._database.is_sqlite:
            with self._database.write() as connection:
                yield connection
            return
        # SQLite's waiting writers poll; those who take turns here are woken at once.
        with self._turn, self._database.write() as connection:
            yield connection

    def _recover(self, row: Row[Any]) -> bool:
        settlement = Settlement(
            status=RECOVERED, prompt_tokens=row.prompt_tokens, completion_tokens=row.checkpoint_tokens
        )
        with self._write() as connection:
            return self._close(connection, row.id, RECOVERED, settlement, row.lease_expires_us)

    def _close(
        self,
        connection: Connection,
        request_id: str,
        state: str,
        settlement: Settlement,
        lease_expires_us: int | None = None,
    ) -> bool:
        table = schema.reservations
        reservation = connection.execute(select(table).where(table.c.id == request_id)).one_or_none()
        if reservation is None:
            raise LookupError(f"there is no reservation {request_id}")
        charges = {item["policy_id"]: Charge.from_json(item) for item in reservation.charges}
        policies = _lock(connection, list(charges))
        close = update(table).where(table.c.id == request_id, table.c.state == "open").values(state=state)
        if lease_expires_us is not None:
            # A gateway that was only slow may have extended its lease since.
            close = close.where(table.c.lease_expires_us == lease_expires_us)
        if connection.execute(close).rowcount != 1:
            return False
        now_us = self._database.now_us(connection)
        buckets = _read_buckets(connection, [policy.id for policy in policies])
        for policy in policies:
            bucket = give_back(policy, buckets[policy.id], charges[policy.id], settlement, now_us)
            _write_bucket(connection, policy.id, bucket)
        connection.execute(insert(schema.usage_events).values(**_event(connection, reservation, settlement, now_us)))
        return True


def _lock(connection: Connection, policy_ids: list[str]) -> tuple[QuotaPolicy, ...]:
    if not policy_ids:
        return ()
    table = schema.quota_policies
    query = select(table).where(table.c.id.in_(policy_ids)).order_by(table.c.id).with_for_update()
    return tuple(policy_of(row) for row in connection.execute(query))


def _read_buckets(connection: Connection, policy_ids: list[str]) -> dict[str, Bucket]:
    if not policy_ids:
        return {}
    table = schema.quota_counters
    rows = connection.execute(select(table).where(table.c.policy_id.in_(policy_ids), table.c.window_start_us == 0))
    return {row.policy_id: Bucket(row.level, row.reserved, row.refilled_us) for row in rows}


def _write_bucket(connection: Connection, policy_id: str, bucket: Bucket) -> None:
    table = schema.quota_counters
    connection.execute(
        update(table)
        .where(table.c.policy_id == policy_id, table.c.window_start_us == 0)
        .values(level=bucket.level, reserved=bucket.reserved, refilled_us=bucket.refilled_us)
    )


def _event(connection: Connection, reservation: Row[Any], settlement: Settlement, now_us: int) -> dict[str, Any]:
    versions = schema.adapter_versions
    adapter = select(versions.c.adapter_id).where(versions.c.id == reservation.adapter_version_id)
    return {
        "request_id": reservation.id,
        "tenant_id": reservation.tenant_id,
        "api_key_id": reservation.api_key_id,
        "adapter_id": connection.execute(adapter).scalar_one_or_none(),
        "adapter_version_id": reservation.adapter_version_id,
        "model": reservation.model,
        "endpoint": reservation.endpoint,
        "status": settlement.status,
        "prompt_tokens": settlement.prompt_tokens,
        "cached_tokens": settlement.cached_tokens,
        "completion_tokens": settlement.completion_tokens,
        "started_us": reservation.created_us,
        "finished_us": now_us,
        "first_token_us": settlement.first_token_us,
    }

"""Stores the response for each Idempotency-Key, with a hash of the request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.migrations.database import Database
from loramux.migrations.schema import idempotency_keys
from loramux.platform.errors import Conflict, UnprocessableRequest

LIFETIME_US = 24 * 3600 * 1_000_000
RUNNING_US = 300 * 1_000_000
"""A claim without a response counts as abandoned at this age, in microseconds. No call takes this long."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed key. Its holder may run the call, and must `complete` or `release` the claim."""

    principal: str
    key_sha256: bytes


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The response to the first call."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class IdempotencyKeys:
    """The idempotency keys of all servers that use the database. Blocking."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, principal: str, key: str, request_sha256: bytes) -> Claim | StoredAnswer:
        """Claim the key for a call, or return the stored response.

        Raises Conflict if the first call with this key is still running or its outcome is unknown, and
        UnprocessableRequest if the key was used for another call.
        """
        claim = Claim(principal, hashlib.sha256(key.encode()).digest())
        try:
            with self._database.write() as connection:
                now_us = self._database.now_us(connection)
                row = connection.execute(select(idempotency_keys).where(*_is(claim)).with_for_update()).one_or_none()
                if row is not None and row.expires_us > now_us:
                    return _answer(row, request_sha256, now_us)
                self._begin(connection, claim, request_sha256, now_us)
        except IntegrityError:
            raise _in_use() from None
        return claim

    def complete(self, claim: Claim, answer: StoredAnswer, expires_us: int | None = None) -> None:
        """Store the response for repeated calls. If `expires_us` is set, the key expires at that time, or after
        LIFETIME_US if that is earlier.
        """
        values: dict[str, Any] = {"status": answer.status, "headers": dict(answer.headers), "body": answer.body}
        with self._database.write() as connection:
            if expires_us is not None:
                values["expires_us"] = min(expires_us, self._database.now_us(connection) + LIFETIME_US)
            connection.execute(update(idempotency_keys).where(*_is(claim)).values(**values))

    def release(self, claim: Claim) -> None:
        """Delete the claim of a call that changed nothing, so that the key can be reused for any call."""
        with self._database.write() as connection:
            connection.execute(delete(idempotency_keys).where(*_is(claim), idempotency_keys.c.status.is_(None)))

    def _begin(self, connection: Connection, claim: Claim, request_sha256: bytes, now_us: int) -> None:
        connection.execute(delete(idempotency_keys).where(*_is(claim)))
        values = {
            "principal": claim.principal,
            "key_sha256": claim.key_sha256,
            "request_sha256": request_sha256,
            "headers": {},
            "body": b"",
            "created_us": now_us,
            "expires_us": now_us + LIFETIME_US,
        }
        connection.execute(insert(idempotency_keys).values(**values))


def _is(claim: Claim) -> tuple[Any, Any]:
    return (idempotency_keys.c.principal == claim.principal, idempotency_keys.c.key_sha256 == claim.key_sha256)


def _answer(row: Row[Any], request_sha256: bytes, now_us: int) -> StoredAnswer:
    if row.request_sha256 != request_sha256:
        problem = "this Idempotency-Key was used for another call"
        raise UnprocessableRequest(problem, param="Idempotency-Key", code="idempotency_key_reused")
    if row.status is not None:
        return StoredAnswer(row.status, row.headers, row.body)
    # abs(), because the start is in the future if the clock was set back.
    if abs(now_us - row.created_us) < RUNNING_US:
        raise _in_use()
    # The server stopped during the first call, or could not store its response.
    raise Conflict(
        "the outcome of the first call with this Idempotency-Key is unknown: check whether it took effect, then use "
        "another key",
        param="Idempotency-Key",
        code="idempotency_outcome_unknown",
    )


def _in_use() -> Conflict:
    problem = "the first call with this Idempotency-Key is still running"
    return Conflict(problem, code="idempotency_key_in_use", retry_after_s=1.0)

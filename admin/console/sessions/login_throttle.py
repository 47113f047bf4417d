"""Throttles failed sign-ins: a burst per address, then one attempt per interval, across all servers."""

from __future__ import annotations

import math

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.admin.server.client_addresses import origin_of
from loramux.migrations.database import Database
from loramux.migrations.schema import login_failures

BURST = 5
REFILL_S = 12
_REFILL_US = REFILL_S * 1_000_000


class LoginThrottle:
    """Counts attempts by IPv4 address or IPv6 /64, the smallest network that a client is assigned. Blocking.

    An attempt counts as failed until it succeeds, so that concurrent attempts cannot exceed the limit.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, address: str) -> int:
        """Count an attempt and return 0. If the address must wait, count nothing and return the seconds to wait."""
        try:
            return self._begin(origin_of(address))
        except IntegrityError:
            # A concurrent attempt has inserted the address's row.
            return self._begin(origin_of(address))

    def _begin(self, origin: str) -> int:
        table = login_failures
        query = select(table.c.forgiven_us).where(table.c.origin == origin)
        with self._database.read() as connection:
            # A flood of attempts is mostly refused here, without taking the database's write lock.
            if wait_s := _wait_s(connection.execute(query).scalar_one_or_none(), self._database.now_us(connection)):
                return wait_s
        with self._database.write() as connection:
            found = connection.execute(query.with_for_update()).scalar_one_or_none()
            now_us = self._database.now_us(connection)
            if wait_s := _wait_s(found, now_us):
                return wait_s
            forgiven_us = now_us + _owed_us(found, now_us) + _REFILL_US
            if found is None:
                connection.execute(insert(table).values(origin=origin, forgiven_us=forgiven_us))
            else:
                connection.execute(update(table).where(table.c.origin == origin).values(forgiven_us=forgiven_us))
        return 0

    def forgive(self, address: str) -> None:
        """Remove a successful attempt from the count. Earlier attempts still count."""
        table = login_failures
        with self._database.write() as connection:
            connection.execute(
                update(table)
                .where(table.c.origin == origin_of(address))
                .values(forgiven_us=table.c.forgiven_us - _REFILL_US)
            )


def _wait_s(forgiven_us: int | None, now_us: int) -> int:
    """Seconds until an address may try again, or 0 if it may try now."""
    return max(0, math.ceil((_owed_us(forgiven_us, now_us) - (BURST - 1) * _REFILL_US) / 1_000_000))


def _owed_us(forgiven_us: int | None, now_us: int) -> int:
    """Microseconds until all attempts from an address are forgiven."""
    owed_us = max(0, (forgiven_us or 0) - now_us)
    # A time above this maximum means that the clock was set back after the row was written: allow the next attempt.
    return owed_us if owed_us <= BURST * _REFILL_US else (BURST - 1) * _REFILL_US

"""Sweeps delete only expired rows, in batches, on both databases, even if several servers sweep concurrently."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Column, Table, insert, select

from loramux.admin.serving.expired_rows import UNTIL, ExpiredRows
from loramux.migrations.database import Database
from loramux.migrations.schema import response_events, responses
from loramux.platform.accounts.tenants import Tenants

NOW_US = 1_000_000
RESPONSE_ID = "resp_1"
"""A response that does not expire, to which all events belong."""


def rows_of(table: Table, until: Column[int], times_us: Sequence[int], tenant_id: str) -> list[dict[str, Any]]:
    rest = [column for column in table.c if column is not until and not column.nullable]
    made = []
    for number, time_us in enumerate(times_us):
        row: dict[str, Any] = {until.name: time_us}
        for column in rest:
            made_of = {bytes: number.to_bytes(32, "big"), str: str(number), int: number}
            row[column.name] = made_of.get(column.type.python_type, {})
            if column.foreign_keys:
                row[column.name] = RESPONSE_ID if column.name == "response_id" else tenant_id
        made.append(row)
    return made


@pytest.mark.parametrize("until", UNTIL, ids=lambda until: until.table.name)
def test_only_expired_rows_are_swept_in_batches(migrated_url: str, until: Column[int]) -> None:
    database = Database(migrated_url, clock=lambda: NOW_US)
    tenant_id = Tenants(database).create("acme").id
    over, lasting = [NOW_US - number for number in range(25)], [NOW_US + 1, NOW_US + 2]
    with database.write() as connection:
        if until.table is response_events:
            [lasting_response] = rows_of(responses, responses.c.expires_us, [NOW_US + 1], tenant_id)
            connection.execute(insert(responses).values({**lasting_response, "id": RESPONSE_ID}))
        connection.execute(insert(until.table), rows_of(until.table, until, [*over, *lasting], tenant_id))
    num_swept: list[int] = []

    def sweep() -> None:
        num_swept.append(ExpiredRows(database, at_once=4).sweep()[until.table.name])

    servers = [threading.Thread(target=sweep) for _ in range(3)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert sum(num_swept) == len(over), "each once"
    with database.read() as connection:
        assert sorted(connection.execute(select(until)).scalars()) == lasting
    assert not any(ExpiredRows(database).sweep().values())
    database.close()

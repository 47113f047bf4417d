from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg


@contextmanager
def refusing(url: str, tables: Sequence[str], code: str) -> Iterator[None]:
    """Make PostgreSQL answer every write to these tables with the given SQLSTATE."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'no space left on device: /secret' USING ERRCODE = '{code}'; END $$"
        )
        for table in tables:
            trigger = f"CREATE TRIGGER refused BEFORE INSERT OR UPDATE ON {table} EXECUTE FUNCTION refuse()"
            connection.execute(trigger.encode())
        yield
        connection.execute("DROP FUNCTION refuse CASCADE")

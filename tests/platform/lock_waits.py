from __future__ import annotations

import time

import psycopg

PATIENCE_S = 20.0


def until_wait(url: str, num_waiting: int) -> None:
    """Wait until this many connections, to any of the server's databases, are waiting for a lock."""
    ends_s = time.monotonic() + PATIENCE_S
    with psycopg.connect(url, autocommit=True) as watching:
        query = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        while watching.execute(query).fetchone() != (num_waiting,):
            assert time.monotonic() < ends_s, f"{num_waiting} should wait for a lock"
            time.sleep(0.01)

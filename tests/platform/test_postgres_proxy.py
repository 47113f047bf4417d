"""Each fault of the proxy reaches its client, and the server has executed what the fault says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from tests.platform.postgres_proxy import AT_CONNECT, IN_QUERIES, Fault, PostgresProxy, SeededPlan, no_faults
from tests.postgres import create_database

EXECUTED = {Fault.LOST_RESET, Fault.LOST_COMMIT, Fault.LOST_HANG, Fault.TRUNCATE}
"""The faults in which the server surely executes the query, and the client learns nothing of it."""


@pytest.fixture(scope="module")
def opened(postgres_server: str) -> Iterator[PostgresProxy]:
    url = create_database(postgres_server, "proxied")
    with closing(PostgresProxy(url, hang_s=0.3, drip_s=0.01)) as made:
        with psycopg.connect(made.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE t (n int)")
        yield made


@pytest.fixture
def proxy(opened: PostgresProxy) -> PostgresProxy:
    """A proxy that breaks nothing yet, in front of an empty table."""
    opened.plan = no_faults
    with psycopg.connect(opened.url, autocommit=True) as connection:
        connection.execute("TRUNCATE t")
    opened.num_injected.clear()
    return opened


def num_rows(proxy: PostgresProxy) -> int:
    proxy.plan = no_faults
    with psycopg.connect(proxy.url) as connection:
        [(number,)] = connection.execute("SELECT count(*) FROM t").fetchall()
    return int(number)


@pytest.mark.parametrize("fault", [one for one in IN_QUERIES if one is not Fault.DRIP], ids=lambda one: one.name)
def test_client_loses_its_query(proxy: PostgresProxy, fault: Fault) -> None:
    with psycopg.connect(proxy.url, autocommit=True) as connection:
        proxy.plan = lambda possible: fault if fault in possible else None
        with pytest.raises(psycopg.OperationalError) as refused:
            connection.execute("BEGIN; INSERT INTO t VALUES (1); COMMIT")
    assert proxy.num_injected == {fault: 1}
    if fault is Fault.SHUTDOWN:
        assert isinstance(refused.value, psycopg.errors.AdminShutdown)
    if fault is not Fault.RESET_AT_ONCE:
        assert num_rows(proxy) == (fault in EXECUTED)


@pytest.mark.parametrize("fault", AT_CONNECT, ids=lambda one: one.name)
def test_client_cannot_connect(proxy: PostgresProxy, fault: Fault) -> None:
    proxy.plan = lambda possible: fault if fault in possible else None
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(proxy.url)
    assert num_rows(proxy) == 0


def test_slow_answer_is_whole(proxy: PostgresProxy) -> None:
    with psycopg.connect(proxy.url, autocommit=True) as connection:
        proxy.plan = lambda possible: Fault.DRIP if Fault.DRIP in possible else None
        assert connection.execute("SELECT repeat('x', 5000)").fetchall() == [("x" * 5000,)]
    assert set(proxy.num_injected) == {Fault.DRIP}


def test_seeded_plan_injects_all_faults_equally_often() -> None:
    plan = SeededPlan(seed=1, rate=0.5)
    chosen = [plan(IN_QUERIES) for _ in range(400)]
    numbers = [chosen.count(fault) for fault in IN_QUERIES]
    assert max(numbers) - min(numbers) <= 1
    assert 120 < chosen.count(None) < 280

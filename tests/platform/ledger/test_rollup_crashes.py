from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Closing, ReservationRequest
from loramux.platform.ledger.rollups import UsageRollups
from loramux.platform.ledger.settlement import Settlement
from tests.migrations.later_schema import LaterDatabase
from tests.platform.ledger import folding_process
from tests.platform.ledger.rollup_checks import all_rollups, num_waiting, rebuild_rollups

NUM_SETTLED = 8
"""Settlements per round, each in its own transaction."""
MAX_FOLDS = 4
"""Largest number of folds by a process before it is killed."""
MAX_MORE_S = 0.008
"""Longest time, in seconds, that a process keeps running after its last counted fold."""
SETTLEMENT = Settlement(status="completed", prompt_tokens=7, completion_tokens=3)


class Folders:
    """Forks one folding process at a time and kills it after a random time."""

    def __init__(self, process: subprocess.Popen[str], told: Path, seed: int) -> None:
        self._process = process
        self._told = told
        self._random = random.Random(seed)
        self.num_amid = 0

    def fold_and_be_killed(self) -> None:
        assert self._process.stdin is not None
        self._told.unlink(missing_ok=True)
        print(self._told, file=self._process.stdin, flush=True)
        pid = int(self._line())
        num_told, ends_s = self._random.randint(1, 2 * MAX_FOLDS), time.monotonic() + 10
        while not (self._told.exists() and self._told.stat().st_size >= num_told) and time.monotonic() < ends_s:
            time.sleep(0.0005)
        time.sleep(self._random.uniform(0, MAX_MORE_S))
        os.kill(pid, signal.SIGKILL)
        assert self._line() == "ended\n"
        self.num_amid += self._told.read_bytes().endswith(b"b")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def folders(url: str, told: Path, seed: int) -> Iterator[Folders]:
    command = [sys.executable, folding_process.__file__, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Folders(process, told, seed)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(6, id="a few"),
        pytest.param(int(os.environ.get("LORAMUX_FOLD_KILLS", "200")), id="many", marks=pytest.mark.campaign),
    ],
)
def test_rollups_equal_the_ledger_after_kills_during_folds(
    database: Database, migrated_url: str, tmp_path: Path, num_kills: int
) -> None:
    tenant = Tenants(database).create("acme")
    key_id = ApiKeys(database).create(tenant.id, "test").key.id
    admission = Admission(database)
    with folders(migrated_url, tmp_path / "told", seed=num_kills) as killed:
        for _ in range(num_kills):
            settle(admission, tenant.id, key_id)
            killed.fold_and_be_killed()
        print(f"{num_kills} killed, {killed.num_amid} in the middle of a fold; {num_waiting(database)} batches wait")
    assert killed.num_amid > 0
    fold_everything(database)
    folded = all_rollups(database)
    assert rebuild_rollups(database) == folded
    rollups = schema.usage_rollups.c
    days = select(func.sum(rollups.requests)).where(rollups.grain == 5, rollups.span_us == 86_400_000_000)
    with database.read() as connection:
        assert connection.execute(days).scalar() == num_kills * NUM_SETTLED


def settle(admission: Admission, tenant_id: str, key_id: str) -> None:
    requests = [
        ReservationRequest(
            request_id=new_id("req"),
            tenant_id=tenant_id,
            api_key_id=key_id,
            model="base",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=7,
            reserved_tokens=20,
            end_user=f"user {number}",
        )
        for number in range(NUM_SETTLED)
    ]
    admission.commit(requests)
    for request in requests:
        admission.commit([Closing(request_id=request.request_id, settlement=SETTLEMENT)])


def fold_everything(database: Database) -> None:
    """Fold every batch, including those still locked by a killed process until PostgreSQL notices its death."""
    ends_s = time.monotonic() + 20
    while num_waiting(database):
        assert time.monotonic() < ends_s
        UsageRollups(database).fold_all()


INSERT_EVENT = (
    "INSERT INTO usage_events (request_id, tenant_id, api_key_id, model, base, endpoint, status, prompt_tokens,"
    " cached_tokens, completion_tokens, started_us, finished_us, cost_nanos, batch_id) VALUES"
    " ('{request_id}', 'ten_1', 'key_1', 'base', 'base', 'chat', 'completed', 7, 0, 3, 0, {at_us}, 0, {batch_id})"
)


class OldGateway(threading.Thread):
    """Settles requests, even during the upgrade and after it."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._database, self._number = Database(url), number
        self.is_over = threading.Event()
        self.num_settled = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._settle(self._number * 1_000_000 + self.num_settled)
                self.num_settled += 1
        except Exception as failure:
            self.failure = failure
        self._database.close()

    def settles(self, num_more: int) -> None:
        wanted, ends_s = self.num_settled + num_more, time.monotonic() + 20
        while self.num_settled < wanted:
            assert self.failure is None, self.failure
            assert time.monotonic() < ends_s
            time.sleep(0.002)

    def _settle(self, batch_id: int) -> None:
        at_us = 1_800_000_000_000_000 + batch_id
        event = INSERT_EVENT.format(request_id=f"req_{batch_id}", at_us=at_us, batch_id=batch_id)
        with self._database.write() as connection:
            connection.exec_driver_sql("SELECT id FROM reservations WHERE id = '' FOR UPDATE")
            connection.exec_driver_sql(event)
            # Give the upgrade time to start during this settlement.
            time.sleep(0.002)
            connection.exec_driver_sql(f"INSERT INTO usage_batches (id, at_us) VALUES ({batch_id}, {at_us})")


def test_settlements_during_an_upgrade_are_counted_once(migrated_postgres_url: str) -> None:
    """The upgrade rebuilds the rollups from the ledger while gateways add to it."""
    database = LaterDatabase(migrated_postgres_url)
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO tenants (id, slug, display_name, state, weight, isolation_secret, created_us)"
            " VALUES ('ten_1', 'acme', 'acme', 'active', 1, '\\x00', 0)"
        )
    gateways = [OldGateway(migrated_postgres_url, number) for number in (1, 2, 3)]
    for gateway in gateways:
        gateway.start()
    try:
        for gateway in gateways:
            gateway.settles(5)
        database.upgrade()
        for gateway in gateways:
            gateway.settles(5)
    finally:
        for gateway in gateways:
            gateway.is_over.set()
            gateway.join(20)
    database.check_schema()
    assert num_waiting(database) > 0, "some settlements came after the upgrade"
    fold_everything(database)
    folded = all_rollups(database)
    assert rebuild_rollups(database) == folded
    rollups = schema.usage_rollups.c
    days = select(func.sum(rollups.requests)).where(rollups.grain == 5, rollups.span_us == 86_400_000_000)
    with database.read() as connection:
        assert connection.execute(days).scalar() == sum(gateway.num_settled for gateway in gateways)
    database.close()

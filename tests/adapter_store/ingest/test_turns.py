from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.ingest.claims import VersionClaims
from loramux.adapter_store.ingest.turns import IngestTurns
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.records import AdapterVersion, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import SECOND_US, DirectValidator, IngestWorld
from tests.adapter_store.waiting import wait_until

HOUR_US = 3600 * SECOND_US


class Queue:
    def __init__(self, database: Database, make_tenant: Callable[[str], str]) -> None:
        self._database = database
        self._upload_rows = UploadRows(database)
        self._registry = AdapterRegistry(database)
        self._make_tenant = make_tenant
        self._adapters: dict[str, str] = {}
        self.names: dict[str, str] = {}

    def add(self, *names: str) -> None:
        """Add a pending version for each name. The first letter of a name is its tenant."""
        for name in names:
            tenant = name[0]
            if tenant not in self._adapters:
                self._adapters[tenant] = self._registry.create_adapter(self._make_tenant(tenant), "support").id
            sha256 = name.encode().hex().ljust(64, "0")
            files = [UploadFile(CONFIG_FILE, 1, sha256), UploadFile(TENSORS_FILE, 1, sha256)]
            upload = self._upload_rows.open_upload(self._adapters[tenant], files, HOUR_US)
            version = self._upload_rows.add_version(self._adapters[tenant], upload.id).version
            self.names[version.id] = name

    def next(self, turns: IngestTurns, *but: str) -> str | None:
        known = {name: version_id for version_id, name in self.names.items()}
        found = turns.next({known[name] for name in but})
        return None if found is None else self.names[found]

    def claim(self, name: str, server: VersionClaims) -> None:
        known = {name: version_id for version_id, name in self.names.items()}
        assert server.claim_version(known[name]) is not None

    def decide(self, turns: IngestTurns, num_versions: int) -> list[str]:
        server = VersionClaims(self._database)
        decided = []
        for _ in range(num_versions):
            version_id = turns.next()
            assert version_id is not None
            assert server.claim_version(version_id) is not None
            server.reject(version_id, {"error": {"code": "x", "message": "x", "param": None}})
            decided.append(self.names[version_id])
        return decided


@pytest.fixture
def queue(database: Database, make_tenant: Callable[[str], str]) -> Queue:
    return Queue(database, make_tenant)


def test_tenants_take_turns_and_oldest_versions_go_first(queue: Queue, database: Database) -> None:
    queue.add("a1", "a2", "a3", "a4", "b1", "c1", "c2")
    turns = IngestTurns(database)
    assert queue.decide(turns, 7) == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]
    assert turns.next() is None


def test_newly_arrived_tenant_is_next(queue: Queue, database: Database) -> None:
    queue.add(*(f"a{number}" for number in range(10)))
    turns = IngestTurns(database)
    assert queue.decide(turns, 2) == ["a0", "a1"]
    queue.add("b0", "b1")
    assert queue.decide(turns, 3) == ["b0", "a2", "b1"]
    # A tenant that had no versions for a while neither gains nor loses turns.
    assert queue.decide(turns, 2) == ["a3", "a4"]
    queue.add("b2", "b3", "b4")
    assert queue.decide(turns, 3) == ["b2", "a5", "b3"]


def test_tenant_with_versions_claimed_elsewhere_goes_last(queue: Queue, database: Database) -> None:
    queue.add("a1", "a2", "a3", "b1")
    other = VersionClaims(database)
    queue.claim("a1", other)
    assert queue.next(IngestTurns(database)) == "b1"
    queue.claim("b1", VersionClaims(database))
    assert queue.next(IngestTurns(database)) == "a2"


def test_failed_versions_are_skipped(queue: Queue, database: Database) -> None:
    queue.add("a1", "a2", "b1")
    turns = IngestTurns(database)
    assert queue.next(turns, "a1", "b1") == "a2"
    assert queue.next(turns, "a1", "a2") == "b1"
    assert queue.next(turns, "a1", "a2", "b1") is None


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_push_during_a_flood_waits_only_for_the_running_version(
    world: IngestWorld, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    flooded = [_pending(world, make_adapter, seed) for seed in range(8)]
    world.adapter_id = world.registry.create_adapter(make_tenant("polite"), "support").id
    files = make_adapter(seed=100)
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    pushed: list[AdapterVersion] = []
    validator = world.validator
    assert isinstance(validator, DirectValidator)
    # The polite tenant pushes while the flood's first version is being validated.
    validator.meanwhile = lambda: pushed.append(world.ingest.create_version(world.adapter_id, upload.id))
    worker = IngestWorker(world.ingest, poll_s=0.05)
    world.ingest.recover()
    worker.start()
    wait_until(lambda: validator.num_calls == 9, timeout_s=60)
    # The worker finishes its current version before it stops.
    worker.stop()
    ready = {version.id: world.registry.get_version(version.adapter_id, version.number) for version in flooded + pushed}
    times = {version_id: version.ready_us or 0 for version_id, version in ready.items() if version is not None}
    assert sorted(times, key=times.__getitem__).index(pushed[0].id) == 1


def _pending(world: IngestWorld, make_adapter: Any, seed: int) -> AdapterVersion:
    files = make_adapter(seed=seed)
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    return world.ingest.create_version(world.adapter_id, upload.id)

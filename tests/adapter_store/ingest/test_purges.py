from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, update

from loramux.adapter_store.blobs.interface import canonical_key, packed_key
from loramux.adapter_store.errors import (
    BlobStoreUnavailable,
    ClaimLost,
    RequestsRunning,
    VersionInUse,
    VersionNotFound,
    WeightsBeingPurged,
)
from loramux.adapter_store.ingest.failpoints import Failpoint
from loramux.adapter_store.ingest.purge_rows import AGAIN_US, lock_digest
from loramux.adapter_store.ingest.purged_blobs import KEPT_US, PurgedBlobs
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations import schema
from loramux.migrations.audit import Actor
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import FailingBlobStore, IngestWorld
from tests.migrations.acting import acting_as
from tests.platform.lock_waits import until_wait

Worlds = Callable[..., IngestWorld]


class Clock:
    now_us = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(migrated_url: str, clock: Clock) -> Iterator[Database]:
    database = Database(migrated_url, clock=clock)
    yield database
    database.close()


def rows_in(database: Database, *tables: Any) -> dict[str, int]:
    with database.read() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        }


def run_request(database: Database, adapter_id: str, version_id: str, state: str = "open") -> str:
    """Insert a reservation for a version, as an admitted request has."""
    with database.write() as connection:
        tenant_id = connection.execute(
            select(schema.adapters.c.tenant_id).where(schema.adapters.c.id == adapter_id)
        ).scalar_one()
        key = {"id": f"key_{state}", "tenant_id": tenant_id, "public_id": state, "secret_sha256": b"", "name": "k"}
        connection.execute(insert(schema.api_keys).values(**key, scopes=[], created_us=0))
        row = {"id": f"req_{state}", "tenant_id": tenant_id, "api_key_id": key["id"], "model": "m", "endpoint": "e"}
        connection.execute(
            insert(schema.reservations).values(
                **row,
                adapter_version_id=version_id,
                state=state,
                prompt_tokens=1,
                reserved_tokens=1,
                charges=[],
                checkpoint_tokens=0,
                created_us=0,
                lease_expires_us=0,
            )
        )
    return str(row["id"])


def test_purged_version_leaves_nothing_and_its_number_is_never_used_again(
    world: IngestWorld, make_adapter: Any, database: Database
) -> None:
    first, second = world.push(make_adapter(seed=1)), world.push(make_adapter(seed=2))
    purges = world.ingest.purge_rows
    found = purges.look(world.adapter_id, 2)
    assert (found.num_versions, found.digests, found.num_bytes) == (1, (second.digest,), second.canonical_bytes)
    with acting_as(Actor("key_admin", "10.0.0.1", "req_purge")):
        assert purges.purge_version(world.adapter_id, 2) == found
    with pytest.raises(VersionNotFound):
        purges.look(world.adapter_id, 2)
    assert world.ingest.purged_blobs.num_deleting() == 2
    world.ingest.remove_abandoned()
    assert world.ingest.purged_blobs.num_deleting() == 0
    world.assert_nothing_left_over(first)
    assert world.ingest.purged_blobs.digests() == {second.digest}
    assert world.push(make_adapter(seed=3)).number == 3
    with database.read() as connection:
        table = schema.audit_log.c
        (entry,) = connection.execute(select(schema.audit_log).where(table.action == "version.purge")).all()
    assert (entry.actor, entry.target) == ("key_admin", f"{world.adapter_id}@2")
    assert entry.changes == {"versions": [1, None], "bytes": [second.canonical_bytes, None]}


def test_version_that_an_alias_names_is_not_purged(world: IngestWorld, make_adapter: Any) -> None:
    version = world.push(make_adapter())
    with pytest.raises(VersionInUse, match="'default'"):
        world.ingest.purge_rows.purge_version(world.adapter_id, 1)
    world.ingest.remove_abandoned()
    world.assert_nothing_left_over(version)


def test_purged_adapter_leaves_only_its_last_number(
    world: IngestWorld, make_adapter: Any, database: Database, make_tenant: Callable[[str], str]
) -> None:
    world.push(make_adapter(seed=1), **{"chat_template.jinja": b"{{ messages }}"})
    world.push(make_adapter(seed=2))
    unfinished = world.upload(make_adapter(seed=3).config_bytes, make_adapter(seed=3).tensor_bytes)
    pending = world.ingest.create_version(world.adapter_id, unfinished.id)
    world.upload(b"{}", b"an upload that is never used")
    adapter = world.registry.get_adapter(world.adapter_id)
    assert adapter is not None
    AdapterGrants(database).add(adapter, make_tenant("guest"))
    AdapterAliases(database).set(world.adapter_id, "beta", {1: 1, 2: 1})
    found = world.ingest.purge_rows.purge_adapter(world.adapter_id)
    assert (found.num_versions, found.aliases, found.num_grants) == (3, ("beta", "default"), 1)
    world.ingest.remove_abandoned()
    assert list(world.blobs.list_keys()) == []
    tables = [
        schema.adapters,
        schema.adapter_versions,
        schema.adapter_version_files,
        schema.adapter_aliases,
        schema.adapter_alias_targets,
        schema.adapter_alias_history,
        schema.adapter_grants,
        schema.uploads,
        schema.version_bases,
    ]
    assert set(rows_in(database, *tables).values()) == {0}
    with pytest.raises(VersionNotFound):
        world.ingest.process(pending.id)
    # The name can be used again, and `acme/support@1` still stands for no other weights than before.
    again = world.registry.create_adapter(adapter.tenant_id, "support")
    world.adapter_id = again.id
    assert world.push(make_adapter(seed=1)).number == 4
    assert world.registry.resolve("acme", "support", version=1) is None


def test_weights_that_another_tenant_has_stay(
    world: IngestWorld, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    files = make_adapter()
    own = world.push(files)
    other_id = world.registry.create_adapter(make_tenant("other"), "twin").id
    first_id, world.adapter_id = world.adapter_id, other_id
    twin = world.push(files)
    assert twin.digest == own.digest
    found = world.ingest.purge_rows.purge_adapter(first_id)
    assert (found.digests, found.num_shared, found.num_bytes) == ((), 1, 0)
    world.ingest.remove_abandoned()
    world.assert_nothing_left_over(twin)
    assert world.ingest.purged_blobs.digests() == frozenset()
    assert world.ingest.purge_rows.purge_adapter(other_id).digests == (twin.digest,)
    world.ingest.remove_abandoned()
    assert list(world.blobs.list_keys()) == []


def test_purge_waits_for_running_requests(world: IngestWorld, make_adapter: Any, database: Database) -> None:
    version = world.push(make_adapter())
    request_id = run_request(database, world.adapter_id, version.id)
    assert world.ingest.purge_rows.look(world.adapter_id, 1).num_running == 1
    with pytest.raises(RequestsRunning, match="1 request is still running"):
        world.ingest.purge_rows.purge_adapter(world.adapter_id)
    with database.write() as connection:
        connection.execute(delete(schema.reservations).where(schema.reservations.c.id == request_id))
    assert world.ingest.purge_rows.purge_adapter(world.adapter_id).num_versions == 1


def test_blobs_are_deleted_after_the_store_recovers(open_world: Worlds, make_adapter: Any) -> None:
    blobs = FailingBlobStore()
    world = open_world(blobs)
    version, files = world.push(make_adapter()), make_adapter()
    adapter = world.registry.get_adapter(world.adapter_id)
    assert adapter is not None
    world.ingest.purge_rows.purge_adapter(world.adapter_id)
    blobs.num_calls = 1
    with pytest.raises(BlobStoreUnavailable):
        world.ingest.remove_abandoned()
    blobs.num_calls = 1_000_000
    # Equal weights must not be accepted while some of their blobs are being deleted.
    world.adapter_id = world.registry.create_adapter(adapter.tenant_id, "support").id
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    again = world.ingest.create_version(world.adapter_id, upload.id)
    with pytest.raises(WeightsBeingPurged):
        world.ingest.process(again.id)
    world.ingest.purged_blobs.clear_up()
    ready = world.ingest.process(again.id)
    assert (ready.state, ready.digest, ready.number) == ("ready", version.digest, 2)
    world.ingest.remove_abandoned()
    world.assert_nothing_left_over(ready)


def test_blobs_that_a_slow_server_wrote_later_are_deleted_too(
    world: IngestWorld, make_adapter: Any, clock: Clock, database: Database
) -> None:
    one, two = world.push(make_adapter(seed=1)), world.push(make_adapter(seed=2))
    assert one.digest is not None
    assert two.digest is not None
    world.ingest.purge_rows.purge_adapter(world.adapter_id)
    world.ingest.remove_abandoned()
    late = packed_key(one.digest, "slow"), f"originals/{one.id}/header"
    for key in late:
        world.blobs.put(key, b"late")
    # The weights of the second version are uploaded again.
    world.adapter_id = world.registry.create_adapter(_tenant_of(database), "support").id
    ready = world.push(make_adapter(seed=2))
    clock.now_us += AGAIN_US - 1
    world.ingest.purged_blobs.clear_up()
    assert world.blobs.exists(late[0])
    clock.now_us += 1
    world.ingest.purged_blobs.clear_up()
    world.assert_nothing_left_over(ready)
    assert world.ingest.purged_blobs.digests() == {one.digest}
    clock.now_us += KEPT_US + 1
    world.ingest.purged_blobs.clear_up()
    assert rows_in(database, schema.purges) == {"purges": 0}
    assert world.blobs.exists(canonical_key(two.digest))


def _tenant_of(database: Database) -> str:
    with database.read() as connection:
        return str(connection.execute(select(schema.tenants.c.id)).scalar_one())


@pytest.mark.parametrize("failpoint", [Failpoint.CLAIMED, Failpoint.VALIDATED, Failpoint.ACCEPTED])
def test_version_purged_during_its_validation_is_never_published(
    world: IngestWorld, make_adapter: Any, tmp_path: Path, failpoint: Failpoint
) -> None:
    def purge(at: Failpoint) -> None:
        if at is failpoint:
            world.ingest.purge_rows.purge_adapter(world.adapter_id)

    files = make_adapter()
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    with pytest.raises((VersionNotFound, ClaimLost)):
        world.another(tmp_path / "other", purge).process(version.id)
    world.ingest.remove_abandoned()
    assert list(world.blobs.list_keys()) == []


def test_equal_weights_that_are_pushed_during_a_purge_are_complete(
    open_world: Worlds, make_adapter: Any, memory_blobs: Any, tmp_path: Path, database: Database
) -> None:
    """Whatever the order, an accepted version has its files, and without a version there are none."""
    world = open_world(memory_blobs)
    tenant_id = _tenant_of(database)
    for turn in range(6):
        files = make_adapter(seed=turn)
        world.adapter_id = world.registry.create_adapter(tenant_id, f"old{turn}").id
        old = world.push(files)
        old_id, world.adapter_id = world.adapter_id, world.registry.create_adapter(tenant_id, f"new{turn}").id
        upload = world.upload(files.config_bytes, files.tensor_bytes)
        new = world.ingest.create_version(world.adapter_id, upload.id)
        begin = threading.Barrier(2)

        def purge(old_id: str = old_id, begin: threading.Barrier = begin) -> None:
            begin.wait()
            world.ingest.purge_rows.purge_adapter(old_id)
            world.ingest.purged_blobs.clear_up()

        thread = threading.Thread(target=purge)
        thread.start()
        begin.wait()
        while True:
            try:
                ready = world.ingest.process(new.id)
                break
            except WeightsBeingPurged:
                continue
        thread.join()
        assert (ready.state, ready.digest) == ("ready", old.digest)
        assert ready.digest is not None
        for key in (canonical_key(ready.digest), f"originals/{ready.id}/header"):
            assert memory_blobs.exists(key), (turn, key)
        world.ingest.purge_rows.purge_adapter(world.adapter_id)
        world.ingest.remove_abandoned()
        assert list(memory_blobs.list_keys()) == []


def test_second_deletion_takes_turns_with_a_purge_of_the_same_weights(
    migrated_postgres_url: str, memory_blobs: Any, clock: Clock
) -> None:
    """Both lock the digest before the row."""
    database, digest = Database(migrated_postgres_url, clock), "a" * 64
    row = {"kind": "digest", "state": "deleted", "purged_us": 0, "due_us": 0}
    again = threading.Thread(target=PurgedBlobs(database, memory_blobs)._begin_again)
    with database.write() as connection:
        connection.execute(insert(schema.purges).values(id=digest, **row))
    with database.write() as connection:
        lock_digest(connection, digest)
        again.start()
        until_wait(migrated_postgres_url, 1)
        # The purge of a version that has had these weights again.
        connection.execute(update(schema.purges).values(purged_us=clock(), due_us=clock() + AGAIN_US))
    again.join(20)
    with database.read() as connection:
        found = connection.execute(select(schema.purges)).one()
    database.close()
    assert (found.state, found.due_us) == ("deleted", clock() + AGAIN_US), "it is not due any more"


def test_second_deletion_does_not_wait_for_a_purge_that_another_server_has_in_hand(
    migrated_postgres_url: str, memory_blobs: Any, clock: Clock
) -> None:
    database, row = Database(migrated_postgres_url, clock), {"state": "deleted", "purged_us": 0, "due_us": 0}
    held, free = "a" * 64, "b" * 64
    again = threading.Thread(target=PurgedBlobs(database, memory_blobs)._begin_again)
    with database.write() as connection:
        for digest in (held, free):
            connection.execute(insert(schema.purges).values(id=digest, kind="digest", **row))
    with database.write() as connection:
        connection.execute(select(schema.purges).where(schema.purges.c.id == held).with_for_update()).one()
        again.start()
        again.join(20)
        is_waiting = again.is_alive()
    again.join(20)
    with database.read() as connection:
        states = {row.id: row.state for row in connection.execute(select(schema.purges))}
    database.close()
    assert (is_waiting, states) == (False, {held: "deleted", free: "deleting"})

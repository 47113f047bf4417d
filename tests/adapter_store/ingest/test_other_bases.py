"""Two bases on one database: versions that were accepted for the first are validated for the second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from loramux.adapter_store.blobs.interface import canonical_key, packed_key
from loramux.adapter_store.errors import BaseInUse, BaseNotFound, ClaimLost
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.base_claims import BaseClaims, BaseTurns
from loramux.adapter_store.ingest.base_validation import BaseValidation
from loramux.adapter_store.ingest.claims import VersionClaims
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.upload_rows import OTHER_BASE_WAIT_US
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.adapter_store.registry.bases import Base, Bases
from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.kernels.layout import LinearShape
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, base_servers, version_bases
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.adapter_store.ingest.ingest_world import DirectValidator, IngestWorld
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.adapter_store.waiting import wait_until

OLD, NEW = "a" * 64, "b" * 64


class TwoBases:
    """A server of the old base in `old`, and any number of servers of the new base."""

    def __init__(
        self, database: Database, blobs: MemoryBlobStore, target: PackTarget, scratch: Path, tenant_id: str
    ) -> None:
        self.database, self.blobs, self.target, self._scratch = database, blobs, target, scratch
        self.bases = Bases(database)
        for base_id in (OLD, NEW):
            self.bases.register(base_id, "llama")
        registry = AdapterRegistry(database, base_id=OLD)
        adapter = registry.create_adapter(tenant_id, "support")
        self.old = IngestWorld(registry, blobs, target, scratch / "old", DirectValidator(), adapter.id)
        self.new_registry = AdapterRegistry(database, base_id=NEW)

    def new_server(self, target: PackTarget | None = None, validator: DirectValidator | None = None) -> Ingest:
        validator = validator or DirectValidator()
        return Ingest(self.new_registry, self.blobs, target or self.target, self._scratch / "new", validator)

    def new_validation(
        self, target: PackTarget | None = None, validator: DirectValidator | None = None
    ) -> BaseValidation:
        found = self.new_server(target, validator).for_base
        assert found is not None
        return found

    def verdict(self, registry: AdapterRegistry, version: AdapterVersion) -> str:
        ref = registry.resolve("acme", "support", version=version.number)
        assert ref is not None
        return ref.base_verdict

    def counts(self, base_id: str = NEW) -> tuple[int, int, int]:
        base = self.bases.get(base_id)
        return base.num_validated, base.num_rejected, base.num_pending


@pytest.fixture
def two(
    database: Database,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_tenant: Callable[[str], str],
) -> TwoBases:
    return TwoBases(database, memory_blobs, target, tmp_path, make_tenant("acme"))


@pytest.fixture
def other_target(target: PackTarget) -> PackTarget:
    """A base with a wider query projection."""
    modules = tuple(
        LinearShape(module.name, module.in_features, 64) if module.name.endswith("q_proj") else module
        for module in target.modules
    )
    return replace(target, modules=modules)


def test_equal_base_accepts_a_version_only_after_validation(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    assert (two.verdict(two.old.registry, version), two.verdict(two.new_registry, version)) == ("ready", "pending")
    assert two.new_registry.list_models(tenant_of(two)) == []
    validation = two.new_validation()
    assert validation.next_waiting() == version.id
    assert validation.process(version.id) == "ready"
    assert two.verdict(two.new_registry, version) == "ready"
    assert [ref.version_id for ref in two.new_registry.list_models(tenant_of(two))] == [version.id]
    assert validation.next_waiting() is None
    assert two.counts() == (1, 0, 0)


def test_base_of_another_shape_rejects_a_version_that_the_first_keeps_serving(
    two: TwoBases, make_adapter: Any, other_target: PackTarget
) -> None:
    version = two.old.push(make_adapter())
    blobs = sorted(two.blobs.list_keys())
    validation = two.new_validation(other_target)
    assert validation.process(version.id) == "rejected"
    assert (two.verdict(two.old.registry, version), two.verdict(two.new_registry, version)) == ("ready", "rejected")
    assert two.old.registry.get_version(version.adapter_id, 1) == version
    assert sorted(two.blobs.list_keys()) == blobs
    assert (two.counts(OLD), two.counts(NEW)) == ((1, 0, 0), (0, 1, 0))
    rejected = two.bases.rejected(NEW, limit=5).data
    assert [(one.tenant_slug, one.adapter_name, one.version, one.code) for one in rejected] == [
        ("acme", "support", 1, "base_mismatch")
    ]
    assert "q_proj" in rejected[0].message
    assert two.bases.rejected(OLD, limit=5).data == ()
    # The verdict is final.
    assert validation.next_waiting() is None
    assert validation.process(version.id) == "rejected"


def test_base_with_another_layout_gets_its_own_packed_file(two: TwoBases, make_adapter: Any) -> None:
    """A pool of bfloat16 has another layout of the same shapes."""
    version = two.old.push(make_adapter())
    bfloat16 = replace(two.target, dtype="bfloat16", geometry=replace(two.target.geometry, adapter_itemsize=2))
    assert two.new_validation(bfloat16).process(version.id) == "ready"
    assert version.digest is not None
    for target in (two.target, bfloat16):
        assert two.blobs.exists(packed_key(version.digest, target.pack_key))


def test_first_base_counts_as_validated_for_existing_versions(
    database: Database,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_tenant: Any,
    make_adapter: Any,
) -> None:
    registry = AdapterRegistry(database)
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    world = IngestWorld(registry, memory_blobs, target, tmp_path, DirectValidator(), adapter.id)
    version = world.push(make_adapter())
    bases = Bases(database)
    for base_id, name in ((OLD, "llama"), (NEW, "llama"), (OLD, "renamed")):
        bases.register(base_id, name)
    found = {base.id: (base.served_name, base.num_validated, base.num_pending) for base in bases.list()}
    assert found == {OLD: ("renamed", 1, 0), NEW: ("llama", 0, 1)}
    assert bases.verdict(version.id, OLD) == "ready"


def test_base_that_registers_after_all_were_forgotten_validates_every_version(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    for base_id in (OLD, NEW):
        two.bases.forget(base_id)
    two.bases.register(NEW, "llama")
    assert two.verdict(two.new_registry, version) == "pending"
    assert two.counts() == (0, 0, 1)


def test_one_server_at_a_time_validates_a_version(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    first, second = (BaseClaims(two.database, NEW, lease_s=30) for _ in range(2))
    assert first.claim_version(version.id) is not None
    assert second.claim_version(version.id) is None
    assert BaseTurns(two.database, NEW).next() is None
    assert two.verdict(two.new_registry, version) == "pending"
    with two.database.write() as connection:
        connection.execute(update(version_bases).values(claim_expires_us=1))
    assert BaseTurns(two.database, NEW).next() == version.id
    assert second.claim_version(version.id) is not None
    for late in (first.renew, first.accept, first.give_back):
        with pytest.raises(ClaimLost):
            late(version.id)
    with pytest.raises(ClaimLost):
        first.reject(version.id, "base_mismatch", "too late")
    second.accept(version.id)
    assert two.verdict(two.new_registry, version) == "ready"


@pytest.mark.parametrize("is_meanwhile", [False, True], ids=["before", "during"])
def test_version_taken_out_of_service_is_not_served(two: TwoBases, make_adapter: Any, is_meanwhile: bool) -> None:
    version = two.old.push(make_adapter())
    states = VersionStates(two.database, two.old.registry)
    validator = DirectValidator()

    def quarantine() -> None:
        states.quarantine(version.adapter_id, version.number)

    if is_meanwhile:
        validator.meanwhile = quarantine
    else:
        quarantine()
    validation = two.new_validation(validator=validator)
    validation.process(version.id)
    assert two.new_registry.resolve("acme", "support", version=version.number) is None
    assert validation.next_waiting() is None
    assert two.counts() == (0, 0, 0)
    states.restore(version.adapter_id, version.number, ["quarantined"])
    assert two.verdict(two.new_registry, version) == ("ready" if is_meanwhile else "pending")


def test_failure_of_the_validator_leaves_the_version_pending(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    validator = DirectValidator()
    validator.is_broken = True
    validation = two.new_validation(validator=validator)
    with pytest.raises(Exception, match="no process can be started"):
        validation.process(version.id)
    assert two.verdict(two.new_registry, version) == "pending"
    validator.is_broken = False
    assert validation.process(version.id) == "ready"


def test_damaged_files_are_rejected_for_the_new_base_alone(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    assert version.digest is not None
    two.blobs.delete(canonical_key(version.digest))
    assert two.new_validation().process(version.id) == "rejected"
    assert two.bases.rejected(NEW, limit=1).data[0].code == "stored_files_damaged"
    assert two.verdict(two.old.registry, version) == "ready"


def test_upload_is_left_to_the_base_that_received_it(
    two: TwoBases, make_adapter: Any, other_target: PackTarget
) -> None:
    files = make_adapter()
    upload = two.old.upload(files.config_bytes, files.tensor_bytes)
    version = two.old.ingest.create_version(two.old.adapter_id, upload.id)
    new = two.new_server(other_target)
    assert new.next_waiting() is None
    assert new.process(version.id).state == "pending"
    assert two.old.ingest.next_waiting() == version.id
    # The old base's servers may be gone for good.
    with two.database.write() as connection:
        connection.execute(
            update(adapter_versions).values(created_us=adapter_versions.c.created_us - OTHER_BASE_WAIT_US)
        )
    assert new.next_waiting() == version.id
    assert new.process(version.id).state == "rejected"


def test_server_that_publishes_for_another_is_not_its_base(two: TwoBases, make_adapter: Any) -> None:
    """A server accepts a version and dies. A server of another base publishes it without validating it."""
    files = make_adapter()
    upload = two.old.upload(files.config_bytes, files.tensor_bytes)
    version = two.old.ingest.create_version(two.old.adapter_id, upload.id)
    fails = RuntimeError("the server dies")

    def die(point: object) -> None:
        if getattr(point, "name", "") == "PACKED_STORED":
            raise fails

    dying = two.old.another(two.old.scratch, at_failpoint=die)
    with pytest.raises(RuntimeError, match="dies"):
        dying.process(version.id)
    with two.database.write() as connection:
        overdue = {"created_us": 1, "claim_expires_us": None}
        connection.execute(update(adapter_versions).values(overdue))
    assert two.new_server().process(version.id).state == "ready"
    assert (two.verdict(two.old.registry, version), two.verdict(two.new_registry, version)) == ("ready", "pending")


def test_pins_apply_only_to_validated_versions(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    AdapterPins(two.database, two.old.registry).set_pinned(version.adapter_id, version.number, True)
    assert AdapterPins(two.database, two.old.registry).digests() == {version.digest}
    assert AdapterPins(two.database, two.new_registry).digests() == frozenset()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_worker_validates_uploads_first_and_reports_its_progress(two: TwoBases, make_adapter: Any) -> None:
    for seed in range(3):
        two.old.push(make_adapter(seed=seed))
    noted: list[Base] = []
    server = two.new_server()
    worker = IngestWorker(server, poll_s=0.05, note_progress=noted.append)
    worker.start()
    wait_until(lambda: two.counts() == (3, 0, 0), timeout_s=30)
    worker.stop()
    assert [(base.num_validated, base.num_pending) for base in noted][-1] == (3, 0)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_version_that_fails_for_the_base_is_tried_after_growing_pauses(two: TwoBases, make_adapter: Any) -> None:
    def fail() -> None:
        raise KeyError("a fault of the server")

    two.old.push(make_adapter())
    validator = DirectValidator()
    validation = two.new_validation(validator=validator)
    now_s = 0.0
    worker = IngestWorker(two.new_server(), poll_s=5.0, clock=lambda: now_s)
    tried = []
    for _ in range(4):
        validator.meanwhile = fail
        worker._validate_for_base(validation)
        tried.append(validator.num_calls)
        now_s += 5.0
    assert tried == [1, 2, 2, 3]
    validator.meanwhile = lambda: None
    now_s += 20.0
    worker._validate_for_base(validation)
    assert two.counts() == (1, 0, 0)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_worker_notes_the_verdicts_of_other_servers(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    other_server = BaseClaims(two.database, NEW, lease_s=60.0)
    assert other_server.claim_version(version.id) is not None
    metrics = GatewayMetrics()

    def shown() -> list[float | None]:
        verdicts = ("ready", "rejected", "pending")
        return [metrics.registry.get_sample_value("loramux_base_versions", {"verdict": name}) for name in verdicts]

    worker = IngestWorker(
        two.new_server(), poll_s=0.02, progress_s=0.02, note_progress=metrics.ingest.note_base_versions
    )
    worker.start()
    wait_until(lambda: shown() == [0, 0, 1], timeout_s=30)
    other_server.reject(version.id, "base_mismatch", "too wide")
    wait_until(lambda: shown() == [0, 1, 0], timeout_s=30)
    worker.stop()


def test_a_rejected_upload_leaves_no_verdicts(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter(), tensors=b"not safetensors")
    assert version.state == "rejected"
    with two.database.read() as connection:
        assert connection.execute(select(version_bases)).all() == []


def test_claims_of_servers_without_a_base_are_unchanged(two: TwoBases, make_adapter: Any) -> None:
    files = make_adapter()
    upload = two.old.upload(files.config_bytes, files.tensor_bytes)
    version = two.old.ingest.create_version(two.old.adapter_id, upload.id)
    assert VersionClaims(two.database).claim_version(version.id) is None
    assert VersionClaims(two.database, base_id=OLD).claim_version(version.id) is not None


def tenant_of(two: TwoBases) -> str:
    adapter = two.old.registry.get_adapter(two.old.adapter_id)
    assert adapter is not None
    return adapter.tenant_id


def test_rejected_versions_are_validated_again(two: TwoBases, make_adapter: Any, other_target: PackTarget) -> None:
    version = two.old.push(make_adapter())
    assert two.new_validation(other_target).process(version.id) == "rejected"
    assert two.bases.revalidate(OLD) == 0
    assert two.bases.revalidate(NEW) == 1
    assert two.counts() == (0, 0, 1)
    assert two.new_validation().process(version.id) == "ready"
    assert two.bases.revalidate(NEW) == 0
    with pytest.raises(BaseNotFound):
        two.bases.revalidate("c" * 64)


def test_a_base_is_forgotten_once_no_server_serves_it(two: TwoBases, make_adapter: Any) -> None:
    version = two.old.push(make_adapter())
    first, second = (OwnServer(two.database, OLD, "llama", f"host-{number}:8000") for number in (1, 2))
    first.report(is_draining=False)
    second.report(is_draining=True)
    servers = [(one.address, one.state) for one in two.bases.get(OLD).servers]
    assert servers == [("host-1:8000", "serving"), ("host-2:8000", "draining")]
    second.leave()
    with pytest.raises(BaseInUse, match="host-1:8000"):
        two.bases.forget(OLD)
    with two.database.write() as connection:
        connection.execute(update(base_servers).values(seen_us=two.database.now_us(connection) - 61_000_000))
    assert [one.state for one in two.bases.get(OLD).servers] == ["silent"]
    two.bases.forget(OLD)
    with pytest.raises(BaseNotFound):
        two.bases.forget(OLD)
    # Only the verdicts for the forgotten base are gone.
    assert two.new_validation().process(version.id) == "ready"
    # The server had only lost the database: it registers its base again, and validates every version for it.
    first.report(is_draining=False)
    assert two.counts(OLD) == (0, 0, 1)
    assert [one.state for one in two.bases.get(OLD).servers] == ["serving"]
    with two.database.write() as connection:
        connection.execute(update(base_servers).values(seen_us=1))
    assert two.bases.get(OLD).servers == ()
    second.report(is_draining=False)
    with two.database.read() as connection:
        assert connection.execute(select(base_servers.c.address)).scalars().all() == ["host-2:8000"]

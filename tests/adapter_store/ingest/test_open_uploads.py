from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.blobs.interface import UPLOADS, BlobStore, PresignedPut
from loramux.adapter_store.errors import BlobStoreUnavailable, LimitReached, UploadNotFound, UploadRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.tenant_caps import MAX_OPEN_LARGEST, MAX_OPEN_UPLOADS, UPLOAD_RETRY_S, TenantCaps
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import Upload, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import SECOND_US, DirectValidator, IngestWorld, chunks
from tests.adapter_store.memory_blobs import MemoryBlobStore

CAPS = TenantCaps(max_open_bytes=1000, max_open_uploads=3, max_pending_versions=2)


@pytest.fixture
def upload_rows(database: Database) -> UploadRows:
    return UploadRows(database, caps=CAPS)


@pytest.fixture
def adapter_ids(registry: AdapterRegistry, make_tenant: Callable[[str], str]) -> list[str]:
    acme, globex = make_tenant("acme"), make_tenant("globex")
    named = ((acme, "support"), (acme, "sales"), (globex, "support"))
    return [registry.create_adapter(tenant_id, name).id for tenant_id, name in named]


def declare(
    upload_rows: UploadRows, adapter_id: str, size: int = 10, lifetime_s: float = 3600, mark: str = "0"
) -> Upload:
    files = [UploadFile(CONFIG_FILE, 1, mark * 64), UploadFile(TENSORS_FILE, size - 1, mark * 64)]
    return upload_rows.open_upload(adapter_id, files, round(lifetime_s * SECOND_US))


def refusal(call: Callable[[], Any]) -> LimitReached:
    with pytest.raises(LimitReached) as refused:
        call()
    return refused.value


def test_open_uploads_per_tenant_are_capped(upload_rows: UploadRows, adapter_ids: list[str]) -> None:
    first, second, other = adapter_ids
    uploads = [declare(upload_rows, adapter_id) for adapter_id in (first, first, second)]
    refused = refusal(lambda: declare(upload_rows, second))
    assert refused.code == "too_many_open_uploads"
    assert 0 < refused.retry_after_s <= UPLOAD_RETRY_S
    declare(upload_rows, other)
    upload_rows.cancel_upload(first, uploads[0].id)
    declare(upload_rows, second)
    refusal(lambda: declare(upload_rows, second))
    upload_rows.add_version(first, uploads[1].id)
    declare(upload_rows, second, lifetime_s=-1)
    declare(upload_rows, second)
    assert refusal(lambda: declare(upload_rows, second)).code == "too_many_open_uploads"


def test_the_bytes_of_open_uploads_are_capped(upload_rows: UploadRows, adapter_ids: list[str]) -> None:
    first, second, _ = adapter_ids
    kept = declare(upload_rows, first, size=600)
    assert refusal(lambda: declare(upload_rows, second, size=401)).code == "too_many_open_uploads"
    declare(upload_rows, second, size=400)
    upload_rows.cancel_upload(first, kept.id)
    declare(upload_rows, first, size=600)


def test_concurrent_uploads_respect_the_cap_exactly(upload_rows: UploadRows, adapter_ids: list[str]) -> None:
    def attempt(number: int) -> bool:
        try:
            declare(upload_rows, adapter_ids[number % 2])
        except LimitReached:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(attempt, range(16))) == [False] * 13 + [True] * 3


def test_pending_versions_per_tenant_are_capped(upload_rows: UploadRows, adapter_ids: list[str]) -> None:
    first, second, other = adapter_ids
    for mark in ("a", "b"):
        upload_rows.add_version(first, declare(upload_rows, first, mark=mark).id)
    third = declare(upload_rows, second, mark="c")
    refused = refusal(lambda: upload_rows.add_version(second, third.id))
    assert (refused.code, refused.retry_after_s) == ("too_many_pending_versions", 2.0)
    found = upload_rows.get_upload(third.id)
    assert found is not None
    assert found.state == "open", "the upload can be used later"
    same = upload_rows.add_version(first, declare(upload_rows, first, mark="a").id)
    assert same.version.number == 1, "an existing version is not counted again"
    upload_rows.add_version(other, declare(upload_rows, other, mark="c").id)
    # Versions that an operator imports from a bucket are never refused, and do not count towards the tenant's cap.
    upload_rows.add_version_from(other, "s3://bucket/one", SECOND_US)
    upload_rows.add_version(other, declare(upload_rows, other, mark="d").id)
    upload_rows.add_version_from(other, "s3://bucket/two", SECOND_US)


def test_concurrent_versions_respect_the_cap_exactly(upload_rows: UploadRows, adapter_ids: list[str]) -> None:
    marks = ("a", "b", "c")
    uploads = [declare(upload_rows, adapter_ids[number % 2], mark=mark) for number, mark in enumerate(marks)]

    def attempt(upload: Upload) -> bool:
        try:
            upload_rows.add_version(upload.adapter_id, upload.id)
        except LimitReached:
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(attempt, uploads)) == [False, True, True]


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_default_cap_limits_open_uploads(world: IngestWorld) -> None:
    for _ in range(MAX_OPEN_UPLOADS):
        world.announce(b"x", b"t")
    assert refusal(lambda: world.announce(b"x", b"t")).code == "too_many_open_uploads"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_default_cap_allows_several_of_the_largest_adapters(world: IngestWorld) -> None:
    largest = [UploadFile(name, num_bytes, "0" * 64) for name, num_bytes in world.ingest._max_bytes.items()]
    for _ in range(MAX_OPEN_LARGEST):
        world.ingest.create_upload(world.adapter_id, largest)
    assert refusal(lambda: world.announce(b"x", b"t")).code == "too_many_open_uploads"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_cancelled_upload_leaves_nothing_behind(open_world: Callable[..., IngestWorld], blobs: BlobStore) -> None:
    world = open_world(blobs)
    upload = world.upload(b"x" * 10, b"t" * 10)
    page = world.ingest.upload_rows.list_open(world.adapter_id, 10)
    assert [found.id for found in page.data] == [upload.id]
    assert len(list(blobs.list_keys(UPLOADS))) == 2
    world.ingest.cancel_upload(world.adapter_id, upload.id)
    assert list(blobs.list_keys(UPLOADS)) == []
    assert world.ingest.upload_rows.list_open(world.adapter_id, 10).data == ()
    for call in (
        lambda: world.ingest.cancel_upload(world.adapter_id, upload.id),
        lambda: world.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x" * 10)),
        lambda: world.ingest.create_version(world.adapter_id, upload.id),
    ):
        with pytest.raises(UploadNotFound):
            call()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_file_uploaded_during_cancellation_is_not_kept(world: IngestWorld) -> None:
    upload = world.announce(b"x" * 10, b"t")

    def cancelled_meanwhile() -> Iterator[bytes]:
        yield b"x" * 5
        world.ingest.cancel_upload(world.adapter_id, upload.id)
        yield b"x" * 5

    with pytest.raises(UploadNotFound):
        world.ingest.put_file(upload.id, CONFIG_FILE, cancelled_meanwhile())
    world.assert_nothing_left_over()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_upload_with_a_version_cannot_be_cancelled(world: IngestWorld, make_adapter: Any) -> None:
    upload = world.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    with pytest.raises(UploadRefused) as refused:
        world.ingest.cancel_upload(world.adapter_id, upload.id)
    assert refused.value.code == "upload_used"
    assert world.ingest.process(version.id).state == "ready"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_expired_upload_releases_its_slot_and_blobs(world: IngestWorld, tmp_path: Path) -> None:
    ingest = Ingest(
        world.registry, world.blobs, world.target, tmp_path / "short", DirectValidator(), upload_lifetime_s=1
    )
    world.ingest = ingest
    upload = world.upload(b"x" * 10, b"t")
    assert len(list(world.blobs.list_keys(UPLOADS))) == 2
    with world.registry.database.write() as connection:
        connection.exec_driver_sql("UPDATE uploads SET expires_us = 1")
    ingest.remove_abandoned()
    assert list(world.blobs.list_keys(UPLOADS)) == []
    assert upload.id not in {found.id for found in ingest.upload_rows.list_open(world.adapter_id, 10).data}


class UnsigningBlobStore(MemoryBlobStore):
    """A blob store that cannot sign requests for now."""

    def presign_put(self, key: str, size: int, sha256: str, expires_s: int) -> PresignedPut | None:
        raise BlobStoreUnavailable("there are no credentials")


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_upload_that_cannot_be_signed_is_removed(open_world: Callable[..., IngestWorld]) -> None:
    world = open_world(UnsigningBlobStore())
    upload = world.announce(b"x", b"t")
    with pytest.raises(BlobStoreUnavailable):
        world.ingest.presign(upload)
    assert world.ingest.upload_rows.list_open(world.adapter_id, 10).data == ()

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, upload_key
from loramux.adapter_store.errors import (
    AdapterNotFound,
    AdapterRejected,
    BlobStoreUnavailable,
    UploadNotFound,
    UploadRefused,
    ValidationFailed,
)
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.records import AdapterVersion, Upload, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from tests.adapter_store.ingest.ingest_world import SECOND_US, DirectValidator, FailingBlobStore, IngestWorld, chunks
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.adapter_store.tiers.open_source import fetch, open_source
from tests.adapter_store.waiting import wait_until


def test_adapter_is_ingested_end_to_end(
    open_world: Callable[..., IngestWorld],
    blobs: BlobStore,
    subprocess_validator: SubprocessValidator,
    make_adapter: Any,
    target: PackTarget,
    tmp_path: Path,
) -> None:
    world = open_world(blobs, subprocess_validator)
    version = world.push(make_adapter(rank=4))
    assert (version.state, version.number, version.max_rank) == ("ready", 1, 4)
    assert version.digest is not None
    assert version.canonical_bytes == len(blobs.read_bytes(canonical_key(version.digest)))
    assert world.aliases() == {"default": {1: 100}}
    world.assert_nothing_left_over(version)
    ref = world.registry.resolve("acme", "support")
    assert ref is not None
    assert fetch(open_source(blobs, target, tmp_path), ref.digest).num_pages == version.num_pages


def test_identical_files_return_the_existing_version(world: IngestWorld, make_adapter: Any) -> None:
    first = world.push(make_adapter())
    assert first.digest is not None
    assert world.push(make_adapter()) == first
    assert world.push(make_adapter(seed=1)).number == 2
    upload = world.upload(make_adapter(seed=2).config_bytes, make_adapter(seed=2).tensor_bytes)
    waiting = world.ingest.create_version(world.adapter_id, upload.id)
    assert world.ingest.create_version(world.adapter_id, upload.id) == waiting, "a repeated request returns it"
    again = world.upload(make_adapter(seed=2).config_bytes, make_adapter(seed=2).tensor_bytes)
    assert world.ingest.create_version(world.adapter_id, again.id) == waiting, "still pending"
    assert world.ingest.process(waiting.id).state == "ready"


def test_equal_adapters_of_two_tenants_share_their_blobs(
    world: IngestWorld, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    first = world.push(make_adapter())
    world.adapter_id = world.registry.create_adapter(make_tenant("globex"), "other").id
    second = world.push(make_adapter())
    assert second.id != first.id
    assert second.digest == first.digest
    world.assert_nothing_left_over(first, second)


def nan(files: Any) -> bytes:
    next(iter(files.tensors.values()))[0, 0] = np.nan
    return bytes(files.tensor_bytes)


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        pytest.param(nan, "not_finite", id="NaN"),
        pytest.param(lambda files: files.tensor_bytes[:-9], "truncated_file", id="truncated"),
        pytest.param(lambda files: b"\x80\x04\x95" + b"x" * 100, "pickle_not_allowed", id="pickle"),
    ],
)
@pytest.mark.parametrize("kind", ["direct", "subprocess"])
def test_rejected_adapter_leaves_one_row_and_no_blob(
    open_world: Callable[..., IngestWorld],
    memory_blobs: MemoryBlobStore,
    make_adapter: Any,
    tensors: Callable[[Any], bytes],
    code: str,
    kind: str,
    subprocess_validator: SubprocessValidator,
) -> None:
    world = open_world(memory_blobs, subprocess_validator if kind == "subprocess" else DirectValidator())
    files = make_adapter()
    version = world.push(files, tensors(files))
    assert (version.state, version.digest, version.ready_us) == ("rejected", None, None)
    assert version.report["error"]["code"] == code
    assert version.report["error"]["param"] is not None
    world.assert_nothing_left_over()
    assert world.registry.resolve("acme", "support") is None
    assert world.push(make_adapter()).number == 2, "a valid version may follow"


def file(name: str = CONFIG_FILE, size: int = 10, sha256: str = "0" * 64) -> UploadFile:
    return UploadFile(name, size, sha256)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("files", "code", "param"),
    [
        pytest.param([], "invalid_files", "files", id="none"),
        pytest.param([file()], "invalid_files", "files", id="one"),
        pytest.param([file(), file()], "invalid_files", "files", id="one twice"),
        pytest.param([file(), file(TENSORS_FILE), file("README.md")], "invalid_files", "files", id="three"),
        pytest.param([file(), file("../" + TENSORS_FILE)], "invalid_files", "files", id="path"),
        pytest.param([file(), file(TENSORS_FILE, size=0)], "invalid_size", "size", id="empty"),
        pytest.param([file(), file(TENSORS_FILE, size=-5)], "invalid_size", "size", id="negative"),
        pytest.param([file(), file(TENSORS_FILE, size=2**40)], "file_too_large", "size", id="terabyte"),
        pytest.param([file(size=2**21), file(TENSORS_FILE)], "file_too_large", "size", id="large configuration"),
        pytest.param([file(), file(TENSORS_FILE, sha256="A" * 64)], "invalid_sha256", "sha256", id="upper case"),
        pytest.param([file(), file(TENSORS_FILE, sha256="")], "invalid_sha256", "sha256", id="no checksum"),
    ],
)
def test_invalid_announcement_is_refused(world: IngestWorld, files: list[UploadFile], code: str, param: str) -> None:
    with pytest.raises(UploadRefused) as refused:
        world.ingest.create_upload(world.adapter_id, files)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(b"", "size_mismatch", id="nothing"),
        pytest.param(b"x" * 9, "size_mismatch", id="too little"),
        pytest.param(b"x" * 11, "size_mismatch", id="too much"),
        pytest.param(b"y" * 10, "checksum_mismatch", id="other bytes"),
    ],
)
def test_unannounced_bytes_are_refused(world: IngestWorld, data: bytes, code: str) -> None:
    upload = world.announce(b"x" * 10, b"t")
    with pytest.raises(UploadRefused) as refused:
        world.ingest.put_file(upload.id, CONFIG_FILE, chunks(data, 4))
    assert refused.value.code == code
    world.assert_nothing_left_over()
    world.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x" * 10))
    world.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x" * 10))


def test_disconnected_client_leaves_nothing_behind(world: IngestWorld) -> None:
    upload = world.announce(b"x" * 10, b"t")

    def cut_off() -> Iterator[bytes]:
        yield b"x" * 5
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        world.ingest.put_file(upload.id, CONFIG_FILE, cut_off())
    world.assert_nothing_left_over()


def test_incomplete_unknown_or_used_upload_is_refused(world: IngestWorld, make_adapter: Any) -> None:
    files = make_adapter()
    upload = world.announce(files.config_bytes, files.tensor_bytes)
    world.ingest.put_file(upload.id, CONFIG_FILE, chunks(files.config_bytes))
    with pytest.raises(UploadRefused) as refused:
        world.ingest.create_version(world.adapter_id, upload.id)
    assert refused.value.code == "upload_incomplete"
    with pytest.raises(UploadNotFound):
        world.ingest.put_file(upload.id, "../../etc/passwd", chunks(b"x"))
    for upload_id in (new_id("upl"), "no such upload", "\0"):
        with pytest.raises(UploadNotFound):
            world.ingest.put_file(upload_id, CONFIG_FILE, chunks(b"x"))
        with pytest.raises(UploadNotFound):
            world.ingest.create_version(world.adapter_id, upload_id)
    with pytest.raises(AdapterNotFound):
        world.ingest.create_version(new_id("ada"), upload.id)
    with pytest.raises(AdapterNotFound):
        world.ingest.create_upload(new_id("ada"), [file(), file(TENSORS_FILE)])
    version = world.push(files)
    used = world.upload(files.config_bytes, files.tensor_bytes)
    assert world.ingest.create_version(world.adapter_id, used.id) == version
    with pytest.raises(UploadRefused) as refused:
        world.ingest.put_file(used.id, CONFIG_FILE, chunks(files.config_bytes))
    assert refused.value.code == "upload_used"


def test_another_adapters_upload_is_not_found(
    world: IngestWorld, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    upload = world.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    other = world.registry.create_adapter(make_tenant("globex"), "other")
    with pytest.raises(UploadNotFound):
        world.ingest.create_version(other.id, upload.id)


def test_expired_upload_is_refused_and_removed(
    migrated_url: str,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_adapter: Any,
    make_tenant: Callable[[str], str],
) -> None:
    now = [1_000 * SECOND_US]
    database = Database(migrated_url, clock=lambda: now[0])
    registry = AdapterRegistry(database)
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    world = IngestWorld(registry, memory_blobs, target, tmp_path / "scratch", DirectValidator(), adapter.id)
    upload = world.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    world.ingest.remove_abandoned()
    assert len(list(memory_blobs.list_keys())) == 2
    now[0] += 86_400 * SECOND_US
    with pytest.raises(UploadRefused) as refused:
        world.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x"))
    assert refused.value.code == "upload_expired"
    with pytest.raises(UploadRefused) as refused:
        world.ingest.create_version(adapter.id, upload.id)
    assert refused.value.code == "upload_expired"
    world.ingest.remove_abandoned()
    world.assert_nothing_left_over()
    with pytest.raises(UploadRefused) as refused:
        world.ingest.create_version(adapter.id, upload.id)
    assert refused.value.code == "upload_expired", "the error stays when the files are deleted"
    used = world.push(make_adapter(seed=1))
    now[0] += 8 * 86_400 * SECOND_US
    world.ingest.remove_abandoned()
    with pytest.raises(UploadNotFound):
        world.ingest.create_version(adapter.id, upload.id)
    world.assert_nothing_left_over(used)
    assert world.push(make_adapter(seed=1)) == used, "used uploads are remembered"
    database.close()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("num_calls", range(7))
def test_store_failure_loses_nothing_and_leaves_nothing_behind(
    open_world: Callable[..., IngestWorld], make_adapter: Any, num_calls: int
) -> None:
    blobs = FailingBlobStore()
    world = open_world(blobs)
    files = make_adapter()
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    blobs.num_calls = num_calls
    # Processing writes four blobs and deletes two. The deletions can be done later.
    if num_calls < 4:
        with pytest.raises(BlobStoreUnavailable):
            world.ingest.process(version.id)
    else:
        assert world.ingest.process(version.id).state == "ready"
    blobs.num_calls = 1_000_000
    (world.scratch / "left by a crash").mkdir(parents=True)
    world.restart().recover()
    while (version_id := world.ingest.next_waiting()) is not None:
        world.ingest.process(version_id)
    found = world.registry.get_version(world.adapter_id, 1)
    assert found is not None
    assert found.state == "ready"
    world.assert_nothing_left_over(found)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("state", ["quarantined", "archived"])
def test_uploading_withdrawn_files_again_does_not_republish_them(
    world: IngestWorld, make_adapter: Any, state: str, database: Database
) -> None:
    world.push(make_adapter(seed=1))
    world.push(make_adapter())
    states = VersionStates(database, world.registry)
    (states.quarantine if state == "quarantined" else states.archive)(world.adapter_id, 2)
    again = world.push(make_adapter())
    assert (again.number, again.state) == (2, state), "the same files name the same version"
    shuffled = make_adapter()
    shuffled.config = dict(reversed(shuffled.config.items()))
    other = world.push(shuffled)
    if state == "quarantined":
        assert (other.number, other.state, other.report["error"]["code"]) == (3, "rejected", "quarantined")
        assert (other.digest, other.max_rank) == (None, None)
        world.adapter_id = world.registry.create_adapter(
            world.registry.list_adapters(None, 1).data[0].tenant_id, "under-another-name"
        ).id
        elsewhere = world.push(make_adapter())
        assert (elsewhere.state, elsewhere.report["error"]["code"]) == ("rejected", "quarantined")
    else:
        assert (other.number, other.state) == (3, "ready")


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_foreign_blob_at_an_upload_key_is_refused(world: IngestWorld, make_adapter: Any) -> None:
    files = make_adapter()
    upload = world.announce(files.config_bytes, files.tensor_bytes)
    for name in (CONFIG_FILE, TENSORS_FILE):
        world.blobs.put(upload_key(upload.id, name), b"something else")
    with pytest.raises(UploadRefused) as refused:
        world.ingest.create_version(world.adapter_id, upload.id)
    assert (refused.value.code, refused.value.param) == ("size_mismatch", "upload_id")
    world.ingest.put_file(upload.id, CONFIG_FILE, chunks(files.config_bytes))
    world.ingest.put_file(upload.id, TENSORS_FILE, chunks(files.tensor_bytes))
    version = world.ingest.create_version(world.adapter_id, upload.id)
    assert world.ingest.process(version.id).state == "ready"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(lambda data: data[:-1] + b"x", "checksum_mismatch", id="other bytes"),
        pytest.param(lambda data: data + b"x", "size_mismatch", id="more bytes"),
        pytest.param(lambda data: data[:-1], "size_mismatch", id="fewer bytes"),
        pytest.param(lambda data: None, "upload_incomplete", id="gone"),
    ],
)
def test_files_changed_after_version_creation_are_not_validated(
    world: IngestWorld, make_adapter: Any, change: Callable[[bytes], bytes | None], code: str
) -> None:
    """Clients can put files into the blob store themselves."""
    files = make_adapter()
    upload = world.announce(files.config_bytes, files.tensor_bytes)
    key = upload_key(upload.id, TENSORS_FILE)
    world.blobs.put(upload_key(upload.id, CONFIG_FILE), files.config_bytes)
    world.blobs.put(key, files.tensor_bytes)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    data = change(world.blobs.read_bytes(key))
    world.blobs.delete(key)
    if data is not None:
        world.blobs.put(key, data)
    found = world.ingest.process(version.id)
    assert (found.state, found.report["error"]["code"]) == ("rejected", code)
    assert isinstance(world.validator, DirectValidator)
    assert world.validator.num_calls == 0
    world.assert_nothing_left_over()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_file_with_wrong_length_is_refused_before_reading(world: IngestWorld) -> None:
    upload = world.announce(b"x" * 10, b"t")

    def unread() -> Iterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    with pytest.raises(UploadRefused) as refused:
        world.ingest.put_file(upload.id, CONFIG_FILE, unread(), num_bytes=11)
    assert refused.value.code == "size_mismatch"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_file_uploaded_after_its_version_is_removed(world: IngestWorld, make_adapter: Any) -> None:
    files = make_adapter()
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    made: list[AdapterVersion] = []

    def slow() -> Iterator[bytes]:
        version = world.ingest.create_version(world.adapter_id, upload.id)
        made.append(world.ingest.process(version.id))
        yield files.config_bytes

    with pytest.raises(UploadRefused) as refused:
        world.ingest.put_file(upload.id, CONFIG_FILE, slow())
    assert refused.value.code == "upload_used"
    world.ingest.remove_abandoned()
    world.assert_nothing_left_over(*made)


def test_broken_validator_rejects_no_adapter(world: IngestWorld, make_adapter: Any) -> None:
    assert isinstance(world.validator, DirectValidator)
    world.validator.is_broken = True
    with pytest.raises(ValidationFailed):
        world.push(make_adapter())
    version_id = world.ingest.next_waiting()
    assert version_id is not None
    world.validator.is_broken = False
    assert world.ingest.process(version_id).state == "ready"


def test_concurrent_versions_get_distinct_numbers(world: IngestWorld, make_adapter: Any) -> None:
    uploads = [
        world.upload(make_adapter(seed=seed).config_bytes, make_adapter(seed=seed).tensor_bytes) for seed in range(6)
    ]
    made: list[AdapterVersion] = []

    def make(upload: Upload) -> None:
        version = world.ingest.create_version(world.adapter_id, upload.id)
        made.append(world.ingest.process(version.id))

    threads = [threading.Thread(target=make, args=(upload,)) for upload in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(version.number for version in made) == [1, 2, 3, 4, 5, 6]
    assert {version.state for version in made} == {"ready"}
    assert len(world.aliases()) == 1


def test_worker_processes_new_versions_and_survives_failures(world: IngestWorld, make_adapter: Any) -> None:
    assert isinstance(world.validator, DirectValidator)
    world.validator.is_broken = True
    worker = IngestWorker(world.ingest, poll_s=0.05, clear_up_s=0.0)
    world.ingest.recover()
    worker.start()
    upload = world.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = world.ingest.create_version(world.adapter_id, upload.id)
    assert version.state == "pending"
    wait_until(lambda: world.validator.num_calls >= 2)  # type: ignore[attr-defined]
    world.validator.is_broken = False
    wait_until(lambda: world.registry.resolve("acme", "support") is not None)
    worker.stop()
    assert not worker._thread.is_alive()


def test_rejection_names_the_error_and_its_location(world: IngestWorld, make_adapter: Any) -> None:
    version = world.push(make_adapter(bias="some"))
    error = version.report["error"]
    assert (error["code"], error["param"]) == ("unsupported_config", "bias")
    assert isinstance(AdapterRejected(**error), AdapterRejected)

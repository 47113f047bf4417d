"""An upload's way to a version: nothing wrong gets in, nothing is left behind, a crash loses nothing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from loramux.adapter_store.aliases import AdapterAliases
from loramux.adapter_store.blobs import BlobStore, canonical_key, packed_key
from loramux.adapter_store.errors import (
    AdapterNotFound,
    AdapterRejected,
    BlobStoreUnavailable,
    UploadNotFound,
    UploadRefused,
)
from loramux.adapter_store.ingest import Ingest
from loramux.adapter_store.ingest_worker import IngestWorker
from loramux.adapter_store.memory_blobs import MemoryBlobStore
from loramux.adapter_store.records import CONFIG_FILE, TENSORS_FILE, AdapterVersion, Upload, UploadFile
from loramux.adapter_store.registry import AdapterRegistry
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.tiers import TieredStore
from loramux.adapter_store.validation_worker import run_job
from loramux.adapter_store.validator import Accepted, SubprocessValidator, ValidationFailed, ValidationJob, Validator
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id

SECOND_US = 1_000_000


class DirectValidator:
    """Validates in this process, which is quicker; can be broken."""

    def __init__(self) -> None:
        self.is_broken = False
        self.num_calls = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while the next adapter is validated."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        self.num_calls += 1
        if self.is_broken:
            raise ValidationFailed("no process can be started")
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return run_job(job, target)


class FailingDatabase(Database):
    """Writes nothing while it is down."""

    is_down = False

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_down:
            raise OperationalError("BEGIN", None, Exception("the server closed the connection"))
        with super().write() as connection:
            yield connection


class FailingBlobStore(MemoryBlobStore):
    """Works for `num_calls` more changes, then is down."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 1_000_000

    def put(self, key: str, source: Path | bytes) -> bool:
        self._count()
        return super().put(key, source)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)

    def _count(self) -> None:
        self.num_calls -= 1
        if self.num_calls < 0:
            raise BlobStoreUnavailable("the store is down")


@dataclass
class House:
    """Everything that ingestion works on."""

    registry: AdapterRegistry
    blobs: BlobStore
    target: PackTarget
    scratch: Path
    validator: Validator
    adapter_id: str

    def __post_init__(self) -> None:
        self.ingest = self.restart()

    def restart(self) -> Ingest:
        self.ingest = Ingest(self.registry, self.blobs, self.target, self.scratch, self.validator)
        return self.ingest

    def aliases(self) -> dict[str, dict[int, int]]:
        """The weights of each alias's versions."""
        named = AdapterAliases(self.registry.database).of([self.adapter_id])[self.adapter_id]
        return {name: {target.number: target.weight for target in alias.targets} for name, alias in named.items()}

    def announce(self, config: bytes, tensors: bytes) -> Upload:
        files = [
            UploadFile(name, len(data), hashlib.sha256(data).hexdigest())
            for name, data in ((CONFIG_FILE, config), (TENSORS_FILE, tensors))
        ]
        return self.ingest.create_upload(self.adapter_id, files)

    def upload(self, config: bytes, tensors: bytes) -> Upload:
        upload = self.announce(config, tensors)
        for name, data in ((CONFIG_FILE, config), (TENSORS_FILE, tensors)):
            self.ingest.put_file(upload.id, name, chunks(data))
        return upload

    def push(self, files: Any, tensors: bytes | None = None) -> AdapterVersion:
        upload = self.upload(files.config_bytes, files.tensor_bytes if tensors is None else tensors)
        version = self.ingest.create_version(self.adapter_id, upload.id)
        return self.ingest.process(version.id) if version.state == "pending" else version

    def assert_nothing_left_over(self, *digests: str) -> None:
        wanted = {canonical_key(digest) for digest in digests}
        wanted |= {packed_key(digest, self.target.pack_key) for digest in digests}
        assert set(self.blobs.list_keys()) == wanted
        assert not self.scratch.exists() or list(self.scratch.iterdir()) == []


def chunks(data: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.fixture
def open_house(
    database: Database, target: PackTarget, tmp_path: Path, make_tenant: Callable[[str], str]
) -> Callable[..., House]:
    def open_one(blobs: BlobStore, validator: Validator | None = None) -> House:
        registry = AdapterRegistry(database)
        adapter = registry.create_adapter(make_tenant("acme"), "support")
        return House(registry, blobs, target, tmp_path / "scratch", validator or DirectValidator(), adapter.id)

    return open_one


@pytest.fixture
def house(open_house: Callable[..., House], memory_blobs: MemoryBlobStore) -> House:
    return open_house(memory_blobs)


def test_an_adapter_goes_all_the_way_to_the_engine(
    open_house: Callable[..., House], blobs: BlobStore, make_adapter: Any, target: PackTarget, tmp_path: Path
) -> None:
    house = open_house(blobs, SubprocessValidator())
    version = house.push(make_adapter(rank=4))
    assert (version.state, version.number, version.max_rank) == ("ready", 1, 4)
    assert version.digest is not None
    assert version.canonical_bytes == len(blobs.read_bytes(canonical_key(version.digest)))
    assert house.aliases() == {"default": {1: 100}}
    house.assert_nothing_left_over(version.digest)
    ref = house.registry.resolve("acme", "support")
    assert ref is not None
    with TieredStore(blobs, target, tmp_path / "disk", 1 << 30, 1 << 30).lease(ref.digest) as lease:
        assert lease.packed.num_pages == version.num_pages


def test_identical_bytes_give_the_existing_version(house: House, make_adapter: Any) -> None:
    first = house.push(make_adapter())
    assert first.digest is not None
    assert house.push(make_adapter()) == first
    assert house.push(make_adapter(seed=1)).number == 2
    upload = house.upload(make_adapter(seed=2).config_bytes, make_adapter(seed=2).tensor_bytes)
    waiting = house.ingest.create_version(house.adapter_id, upload.id)
    assert house.ingest.create_version(house.adapter_id, upload.id) == waiting, "asked for twice"
    again = house.upload(make_adapter(seed=2).config_bytes, make_adapter(seed=2).tensor_bytes)
    assert house.ingest.create_version(house.adapter_id, again.id) == waiting, "still waiting"
    assert house.ingest.process(waiting.id).state == "ready"


def test_equal_adapters_of_two_tenants_share_their_blobs(
    house: House, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    first = house.push(make_adapter())
    house.adapter_id = house.registry.create_adapter(make_tenant("globex"), "other").id
    second = house.push(make_adapter())
    assert second.id != first.id
    assert second.digest == first.digest
    house.assert_nothing_left_over(first.digest or "")


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
def test_a_refused_adapter_leaves_one_row_and_no_blob(
    open_house: Callable[..., House],
    memory_blobs: MemoryBlobStore,
    make_adapter: Any,
    tensors: Callable[[Any], bytes],
    code: str,
    kind: str,
) -> None:
    house = open_house(memory_blobs, SubprocessValidator() if kind == "subprocess" else DirectValidator())
    files = make_adapter()
    version = house.push(files, tensors(files))
    assert (version.state, version.digest, version.ready_us) == ("rejected", None, None)
    assert version.report["error"]["code"] == code
    assert version.report["error"]["param"] is not None
    house.assert_nothing_left_over()
    assert house.registry.resolve("acme", "support") is None
    assert house.push(make_adapter()).number == 2, "a good one may follow"


def file(name: str = CONFIG_FILE, size: int = 10, sha256: str = "0" * 64) -> UploadFile:
    return UploadFile(name, size, sha256)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
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
def test_a_bad_announcement_is_refused(house: House, files: list[UploadFile], code: str, param: str) -> None:
    with pytest.raises(UploadRefused) as refused:
        house.ingest.create_upload(house.adapter_id, files)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(b"", "size_mismatch", id="nothing"),
        pytest.param(b"x" * 9, "size_mismatch", id="too little"),
        pytest.param(b"x" * 11, "size_mismatch", id="too much"),
        pytest.param(b"y" * 10, "checksum_mismatch", id="other bytes"),
    ],
)
def test_bytes_that_were_not_announced_are_refused(house: House, data: bytes, code: str) -> None:
    upload = house.announce(b"x" * 10, b"t")
    with pytest.raises(UploadRefused) as refused:
        house.ingest.put_file(upload.id, CONFIG_FILE, chunks(data, 4))
    assert refused.value.code == code
    house.assert_nothing_left_over()
    house.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x" * 10))
    house.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x" * 10))


def test_a_client_that_goes_away_leaves_nothing(house: House) -> None:
    upload = house.announce(b"x" * 10, b"t")

    def cut_off() -> Iterator[bytes]:
        yield b"x" * 5
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        house.ingest.put_file(upload.id, CONFIG_FILE, cut_off())
    house.assert_nothing_left_over()


def test_an_upload_must_be_there_complete_and_in_time(house: House, make_adapter: Any) -> None:
    files = make_adapter()
    upload = house.announce(files.config_bytes, files.tensor_bytes)
    house.ingest.put_file(upload.id, CONFIG_FILE, chunks(files.config_bytes))
    with pytest.raises(UploadRefused) as refused:
        house.ingest.create_version(house.adapter_id, upload.id)
    assert refused.value.code == "upload_incomplete"
    with pytest.raises(UploadNotFound):
        house.ingest.put_file(upload.id, "../../etc/passwd", chunks(b"x"))
    for upload_id in (new_id("upl"), "no such upload", "\0"):
        with pytest.raises(UploadNotFound):
            house.ingest.put_file(upload_id, CONFIG_FILE, chunks(b"x"))
        with pytest.raises(UploadNotFound):
            house.ingest.create_version(house.adapter_id, upload_id)
    with pytest.raises(AdapterNotFound):
        house.ingest.create_version(new_id("ada"), upload.id)
    with pytest.raises(AdapterNotFound):
        house.ingest.create_upload(new_id("ada"), [file(), file(TENSORS_FILE)])
    version = house.push(files)
    used = house.upload(files.config_bytes, files.tensor_bytes)
    assert house.ingest.create_version(house.adapter_id, used.id) == version
    with pytest.raises(UploadRefused) as refused:
        house.ingest.put_file(used.id, CONFIG_FILE, chunks(files.config_bytes))
    assert refused.value.code == "upload_used"


def test_another_adapters_upload_is_not_found(
    house: House, make_adapter: Any, make_tenant: Callable[[str], str]
) -> None:
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    other = house.registry.create_adapter(make_tenant("globex"), "other")
    with pytest.raises(UploadNotFound):
        house.ingest.create_version(other.id, upload.id)


def test_an_expired_upload_is_refused_and_cleared_away(
    database_url: str,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_adapter: Any,
    make_tenant: Callable[[str], str],
) -> None:
    now = [1_000 * SECOND_US]
    database = Database(database_url, clock=lambda: now[0])
    registry = AdapterRegistry(database)
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    house = House(registry, memory_blobs, target, tmp_path / "scratch", DirectValidator(), adapter.id)
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    house.ingest.remove_abandoned()
    assert len(list(memory_blobs.list_keys())) == 2
    now[0] += 86_400 * SECOND_US
    with pytest.raises(UploadRefused) as refused:
        house.ingest.put_file(upload.id, CONFIG_FILE, chunks(b"x"))
    assert refused.value.code == "upload_expired"
    with pytest.raises(UploadRefused) as refused:
        house.ingest.create_version(adapter.id, upload.id)
    assert refused.value.code == "upload_expired"
    house.ingest.remove_abandoned()
    house.assert_nothing_left_over()
    with pytest.raises(UploadRefused) as refused:
        house.ingest.create_version(adapter.id, upload.id)
    assert refused.value.code == "upload_expired", "still said when its files are gone"
    database.close()


@pytest.mark.parametrize("num_calls", range(6))
def test_a_store_that_fails_at_any_point_loses_and_leaves_nothing(
    open_house: Callable[..., House], make_adapter: Any, num_calls: int
) -> None:
    blobs = FailingBlobStore()
    house = open_house(blobs)
    files = make_adapter()
    upload = house.upload(files.config_bytes, files.tensor_bytes)
    version = house.ingest.create_version(house.adapter_id, upload.id)
    blobs.num_calls = num_calls
    # Two blobs are put and two deleted.
    if num_calls < 4:
        with pytest.raises(BlobStoreUnavailable):
            house.ingest.process(version.id)
    else:
        house.ingest.process(version.id)
    blobs.num_calls = 1_000_000
    (house.scratch / "left by a crash").mkdir(parents=True)
    house.restart().recover()
    for version_id in house.ingest.pending_versions():
        house.ingest.process(version_id)
    found = house.registry.get_version(house.adapter_id, 1)
    assert found is not None
    assert found.state == "ready"
    house.assert_nothing_left_over(found.digest or "")


def test_a_version_that_was_in_hand_when_the_process_died_is_taken_up_again(house: House, make_adapter: Any) -> None:
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = house.ingest.create_version(house.adapter_id, upload.id)
    die_while_validating(house, version)
    assert house.ingest.process(version.id).state == "validating", "another worker has it"
    house.restart().recover()
    assert house.ingest.pending_versions() == [version.id]
    assert house.ingest.process(version.id).state == "ready"


def die_while_validating(house: House, version: AdapterVersion) -> None:
    """Leave everything as a process does that is killed in the middle."""
    house.ingest._claims.note(version.id)
    assert house.ingest._intake.claim(version.id) is not None


def test_a_second_server_that_starts_leaves_the_first_its_version(
    house: House, make_adapter: Any, tmp_path: Path
) -> None:
    assert isinstance(house.validator, DirectValidator)
    second = Ingest(house.registry, house.blobs, house.target, tmp_path / "second", DirectValidator())
    seen: list[list[str]] = []

    def start_second() -> None:
        second.recover()
        seen.append(second.pending_versions())

    house.validator.meanwhile = start_second
    version = house.push(make_adapter())
    assert (seen, version.state) == ([[]], "ready")
    house.assert_nothing_left_over(version.digest or "")


@pytest.mark.parametrize("first_to_end", ["first", "second"])
def test_two_servers_that_validate_one_version_end_with_one_verdict(
    house: House, make_adapter: Any, tmp_path: Path, first_to_end: str
) -> None:
    assert isinstance(house.validator, DirectValidator)
    second = Ingest(house.registry, house.blobs, house.target, tmp_path / "second", DirectValidator())
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = house.ingest.create_version(house.adapter_id, upload.id)

    def take_away() -> None:
        house.ingest._intake.give_back(version.id)
        if first_to_end == "second":
            second.process(version.id)

    house.validator.meanwhile = take_away
    after_first = house.ingest.process(version.id)
    if first_to_end == "first":
        assert after_first.state == "pending", "it is another's now, who still needs the files"
        after_first = second.process(version.id)
    assert after_first.state == "ready"
    house.assert_nothing_left_over(after_first.digest or "")


def test_files_that_another_server_used_up_are_no_reason_to_reject(house: House, make_adapter: Any) -> None:
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = house.ingest.create_version(house.adapter_id, upload.id)
    claimed = house.ingest._intake.claim(version.id)
    house.ingest._intake.give_back(version.id)
    assert house.ingest.process(version.id).state == "ready"
    assert claimed is not None
    assert not house.ingest._reach_verdict(version, claimed)
    assert house.ingest._intake.get_version(version.id).state == "ready"


def test_a_version_whose_server_is_lost_is_taken_up_after_an_hour(
    database_url: str,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_adapter: Any,
    make_tenant: Callable[[str], str],
) -> None:
    now = [1_000_000 * SECOND_US]
    database = Database(database_url, clock=lambda: now[0])
    registry = AdapterRegistry(database)
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    lost = House(registry, memory_blobs, target, tmp_path / "lost", DirectValidator(), adapter.id)
    upload = lost.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = lost.ingest.create_version(adapter.id, upload.id)
    die_while_validating(lost, version)
    other = House(registry, memory_blobs, target, tmp_path / "other", DirectValidator(), adapter.id)
    now[0] += 3599 * SECOND_US
    other.ingest.recover()
    assert other.ingest.pending_versions() == []
    now[0] += 2 * SECOND_US
    other.ingest.remove_abandoned()
    assert other.ingest.process(version.id).state == "ready"
    database.close()


def test_a_version_that_could_not_be_given_back_is_given_back_later(
    database_url: str,
    memory_blobs: MemoryBlobStore,
    target: PackTarget,
    tmp_path: Path,
    make_adapter: Any,
    make_tenant: Callable[[str], str],
) -> None:
    database = FailingDatabase(database_url)
    registry = AdapterRegistry(database)
    adapter = registry.create_adapter(make_tenant("acme"), "support")
    validator = DirectValidator()
    house = House(registry, memory_blobs, target, tmp_path / "scratch", validator, adapter.id)
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = house.ingest.create_version(adapter.id, upload.id)
    validator.meanwhile = lambda: setattr(database, "is_down", True)
    worker = IngestWorker(house.ingest, poll_s=0.02)
    worker.start()
    wait_until(lambda: database.is_down and bool(house.ingest._stranded))
    assert house.ingest._intake.get_version(version.id).state == "validating"
    database.is_down = False
    wait_until(lambda: house.ingest._intake.get_version(version.id).state == "ready")
    worker.stop()
    assert validator.num_calls == 2
    house.assert_nothing_left_over(house.ingest._intake.get_version(version.id).digest or "")
    database.close()


def test_a_validator_that_cannot_run_refuses_nobody(house: House, make_adapter: Any) -> None:
    assert isinstance(house.validator, DirectValidator)
    house.validator.is_broken = True
    with pytest.raises(ValidationFailed):
        house.push(make_adapter())
    (version_id,) = house.ingest.pending_versions()
    house.validator.is_broken = False
    assert house.ingest.process(version_id).state == "ready"


def test_versions_made_at_once_get_numbers_of_their_own(house: House, make_adapter: Any) -> None:
    uploads = [
        house.upload(make_adapter(seed=seed).config_bytes, make_adapter(seed=seed).tensor_bytes) for seed in range(6)
    ]
    made: list[AdapterVersion] = []

    def make(upload: Upload) -> None:
        version = house.ingest.create_version(house.adapter_id, upload.id)
        made.append(house.ingest.process(version.id))

    threads = [threading.Thread(target=make, args=(upload,)) for upload in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(version.number for version in made) == [1, 2, 3, 4, 5, 6]
    assert {version.state for version in made} == {"ready"}
    assert len(house.aliases()) == 1


def test_the_worker_takes_what_comes_and_outlives_failures(house: House, make_adapter: Any) -> None:
    assert isinstance(house.validator, DirectValidator)
    house.validator.is_broken = True
    worker = IngestWorker(house.ingest, poll_s=0.05, clear_up_s=0.0)
    house.ingest.recover()
    worker.start()
    upload = house.upload(make_adapter().config_bytes, make_adapter().tensor_bytes)
    version = house.ingest.create_version(house.adapter_id, upload.id)
    assert version.state == "pending"
    wait_until(lambda: house.validator.num_calls >= 2)
    house.validator.is_broken = False
    wait_until(lambda: house.registry.resolve("acme", "support") is not None)
    worker.stop()
    assert not worker._thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("it did not happen in time")


def test_a_rejection_says_what_and_where(house: House, make_adapter: Any) -> None:
    version = house.push(make_adapter(use_dora=True))
    error = version.report["error"]
    assert (error["code"], error["param"]) == ("unsupported_config", "use_dora")
    assert isinstance(AdapterRejected(**error), AdapterRejected)

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.errors import BlobStoreUnavailable, ValidationFailed
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.failpoints import FailpointHook, no_op
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.originals import config_key, header_key
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.records import AdapterVersion, Upload, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.validation.validator import Accepted, ValidationJob, Validator
from loramux.adapter_store.validation.worker import run_job
from loramux.migrations.database import Database
from tests.adapter_store.memory_blobs import MemoryBlobStore

SECOND_US = 1_000_000


@dataclass
class Clock:
    now_us: int = 1_000_000 * SECOND_US

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * SECOND_US)


class DirectValidator:
    """Validates in the calling process, which is faster. Tests can make it fail."""

    def __init__(self) -> None:
        self.is_broken = False
        self.num_calls = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """Called once, during the next validation."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        self.num_calls += 1
        if self.is_broken:
            raise ValidationFailed("no process can be started")
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return run_job(job, target)


class FailingDatabase(Database):
    """A database that refuses writes while `is_down` is set."""

    is_down = False

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_down:
            raise OperationalError("BEGIN", None, Exception("the server closed the connection"))
        with super().write() as connection:
            yield connection


class FailingBlobStore(MemoryBlobStore):
    """A blob store that accepts `num_calls` more writes and deletions and then fails."""

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
class IngestWorld:
    registry: AdapterRegistry
    blobs: BlobStore
    target: PackTarget
    scratch: Path
    validator: Validator
    adapter_id: str

    def __post_init__(self) -> None:
        self.ingest = self.restart()

    def restart(self) -> Ingest:
        self.ingest = self.another(self.scratch)
        return self.ingest

    def another(self, scratch: Path, at_failpoint: FailpointHook = no_op, lease_s: float = 30.0) -> Ingest:
        return Ingest(
            self.registry, self.blobs, self.target, scratch, self.validator, lease_s=lease_s, at_failpoint=at_failpoint
        )

    def aliases(self) -> dict[str, dict[int, int]]:
        """Each alias's version numbers and their weights."""
        named = AdapterAliases(self.registry.database).of([self.adapter_id])[self.adapter_id]
        return {name: {target.number: target.weight for target in alias.targets} for name, alias in named.items()}

    def announce(self, config: bytes, tensors: bytes, **further: bytes) -> Upload:
        files = [
            UploadFile(name, len(data), hashlib.sha256(data).hexdigest())
            for name, data in {CONFIG_FILE: config, TENSORS_FILE: tensors, **further}.items()
        ]
        return self.ingest.create_upload(self.adapter_id, files)

    def upload(self, config: bytes, tensors: bytes, **further: bytes) -> Upload:
        upload = self.announce(config, tensors, **further)
        for name, data in {CONFIG_FILE: config, TENSORS_FILE: tensors, **further}.items():
            self.ingest.put_file(upload.id, name, chunks(data))
        return upload

    def push(self, files: Any, tensors: bytes | None = None, **further: bytes) -> AdapterVersion:
        """`further` maps the names of optional files to their content."""
        upload = self.upload(files.config_bytes, files.tensor_bytes if tensors is None else tensors, **further)
        version = self.ingest.create_version(self.adapter_id, upload.id)
        return self.ingest.process(version.id) if version.state == "pending" else version

    def assert_nothing_left_over(self, *versions: AdapterVersion) -> None:
        """Check that the store contains exactly the blobs of these ready versions. Packed files are optional."""
        needed, packed = set(), set()
        for version in versions:
            assert version.digest is not None
            needed |= {canonical_key(version.digest), config_key(version.id), header_key(version.id)}
            packed.add(packed_key(version.digest, self.target.pack_key))
        assert set(self.blobs.list_keys()) - packed == needed
        assert [path.name for path in self.scratch.glob("*") if not path.name.startswith("kept-")] == []


def chunks(data: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]

"""Starts real ingestion processes, kills them, and checks the state that they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.formats.files.file_names import FURTHER_FILES
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.originals import config_key, header_key
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_files import read_further_files
from loramux.migrations.database import Database

REPOSITORY = Path(__file__).parents[3]
AWS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


class ProcessMaker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapter_store.ingest.ingest_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(self, job: Mapping[str, Any]) -> int:
        return int(self._ask(do="start", job=dict(job))["process"])

    def signal(self, process: int, number: int) -> None:
        self._ask(do="signal", process=process, signal=number)

    def wait(self, process: int, is_stop_enough: bool = False) -> int:
        """Wait for a process. Return its exit status, or the negated number of the signal that killed or stopped it."""
        return int(self._ask(do="wait", process=process, is_stop_enough=is_stop_enough)["end"])

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@dataclass
class Lab:
    makers: ProcessMaker
    database_url: str
    blob_url: str
    blobs: BlobStore
    target: PackTarget
    directory: Path
    adapter_id: str
    files: Mapping[str, bytes]
    lease_s: float = 30.0
    is_sandboxed: bool = False
    num_servers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._database = Database(self.database_url)
        self.acknowledged_path = self.directory / "acknowledged"
        self.files_directory = self.directory / "files"
        self.files_directory.mkdir()
        self.replace_files(self.files)

    def close(self) -> None:
        self._database.close()

    def replace_files(self, files: Mapping[str, bytes]) -> None:
        """Replace the adapter that the next processes upload."""
        self.files = files
        for name, data in files.items():
            (self.files_directory / name).write_bytes(data)

    def start(self, kind: str, **details: Any) -> int:
        self.num_servers += 1
        job = {
            "kind": kind,
            "database_url": self.database_url,
            "blob_url": self.blob_url,
            "target": self.target.document(),
            "scratch": str(self.directory / f"scratch-{self.num_servers}"),
            "lease_s": self.lease_s,
            "is_sandboxed": self.is_sandboxed,
            "adapter_id": self.adapter_id,
            "files": str(self.files_directory),
            "sizes": {name: len(data) for name, data in self.files.items()},
            "checksums": {name: digest_of(data) for name, data in self.files.items()},
            "acknowledged": str(self.acknowledged_path),
            "environment": {name: os.environ[name] for name in AWS if name in os.environ},
        }
        return self.makers.start({**job, **details})

    def run(self, kind: str, **details: Any) -> int:
        return self.makers.wait(self.start(kind, **details))

    def acknowledged(self, what: str) -> list[str]:
        """Return the identifiers or names of this kind that a client received."""
        if not self.acknowledged_path.exists():
            return []
        pairs = [line.split(" ") for line in self.acknowledged_path.read_text().splitlines()]
        return [name for kind, name in pairs if kind == what]

    def versions(self) -> list[AdapterVersion]:
        return list(reversed(AdapterRegistry(self._database).list_versions(self.adapter_id, 100).data))

    def check_served(self) -> AdapterVersion | None:
        """Check all bytes of the version that the adapter's name resolves to. Return the version, or None if there is
        none.
        """
        registry = AdapterRegistry(self._database)
        ref = registry.resolve("acme", "support")
        if ref is None:
            return None
        canonical = self.blobs.read_bytes(canonical_key(ref.digest))
        assert digest_of(canonical) == ref.digest
        assert pack(canonical, self.target).digest == ref.digest
        version = registry.get_version(self.adapter_id, ref.version)
        assert version is not None
        assert version.state == "ready"
        export = VersionExport(self._database, self.blobs, self.directory / "export")
        for name in self.files:
            with export.open(version, name) as file:
                assert b"".join(file.chunks()) == self.files[name], "exported files equal the uploaded files"
        return version

    def check_blobs(self) -> None:
        """Check that the store contains the blobs that ready versions need and no others. Packed files are optional.

        The database must have the optional files of ready versions and no others.
        """
        needed, packed = set(), set()
        for version in self.versions():
            kept = read_further_files(self._database, version.id)
            further = [name for name in FURTHER_FILES if name in self.files and version.state == "ready"]
            assert kept == {name: self.files[name] for name in further}
            if version.state == "ready":
                assert version.digest is not None
                needed |= {canonical_key(version.digest), config_key(version.id), header_key(version.id)}
                packed.add(packed_key(version.digest, self.target.pack_key))
        assert set(self.blobs.list_keys()) - packed == needed


KILLED = -signal.SIGKILL
STOPPED = -signal.SIGSTOP

"""Exports a version's files exactly as they were uploaded."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    BlobNotFound,
    FileNotFound,
    OriginalNotKept,
    VersionNotReady,
)
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, FURTHER_FILES
from loramux.adapter_store.ingest.originals import KeptHeader, config_key, header_key, sha256_of
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import AdapterVersion, UploadFile
from loramux.adapter_store.registry.version_files import read_further_files
from loramux.migrations.database import Database

_EXPORTABLE = ("ready", "archived")


class ExportedFile:
    """One uploaded file, rebuilt and verified against its declaration. Close the file to free its disk space."""

    def __init__(self, declared: UploadFile, content: bytes, header: KeptHeader | None, canonical: BinaryIO | None):
        self.declared = declared
        self._content = content
        self._header = header
        self._canonical = canonical

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes, without holding a whole tensors file in memory."""
        if self._header is None or self._canonical is None:
            yield self._content
        else:
            yield from self._header.rebuild(self._canonical)

    def close(self) -> None:
        if self._canonical is not None:
            self._canonical.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class VersionExport:
    """Rebuilds uploaded files.

    The canonical file is copied to `scratch_dir` and unlinked, so a crash leaves no file behind.
    """

    database: Database
    blobs: BlobStore
    scratch_dir: Path

    def files(self, version: AdapterVersion) -> tuple[UploadFile, ...]:
        """Return a version's declared files, or none if no server has read them from the version's source yet."""
        return UploadRows(self.database).upload_of_version(version.id).files

    def open(self, version: AdapterVersion, name: str) -> ExportedFile:
        """Open one file of a version.

        Raises FileNotFound, VersionNotReady unless the version is ready or archived, OriginalNotKept if an older
        release of loramux created the version, or AdapterCorrupt if the stored bytes do not match the upload.
        """
        declared = next((file for file in self.files(version) if file.name == name), None)
        if declared is None:
            raise FileNotFound("the version has no file of that name")
        if version.state not in _EXPORTABLE or version.digest is None:
            raise VersionNotReady(f"version {version.number} is {version.state}")
        file = self._file(version.id, version.digest, declared)
        try:
            if sha256_of(file.chunks()) != declared.sha256:
                raise AdapterCorrupt("the uploaded file cannot be rebuilt: the stored bytes differ")
        except BaseException:
            file.close()
            raise
        return file

    def _file(self, version_id: str, digest: str, declared: UploadFile) -> ExportedFile:
        if declared.name in FURTHER_FILES:
            content = read_further_files(self.database, version_id).get(declared.name)
            if content is None:
                raise AdapterCorrupt(f"the version's {declared.name} is missing")
            return ExportedFile(declared, content, None, None)
        try:
            kept = self.blobs.read_bytes(
                config_key(version_id) if declared.name == CONFIG_FILE else header_key(version_id)
            )
        except BlobNotFound:
            raise OriginalNotKept("the version was created before loramux began to keep uploaded files") from None
        if declared.name == CONFIG_FILE:
            return ExportedFile(declared, kept, None, None)
        return ExportedFile(declared, b"", KeptHeader.decode(kept), self._canonical(digest))

    def _canonical(self, digest: str) -> BinaryIO:
        path = self.scratch_dir / f"export-{uuid.uuid4().hex}"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.blobs.get(canonical_key(digest), path)
            return path.open("rb")
        except BlobNotFound:
            raise AdapterCorrupt("the canonical file is missing") from None
        finally:
            # The kernel frees an unlinked file when its reader closes it.
            path.unlink(missing_ok=True)

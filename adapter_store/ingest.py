"""The way of an upload: declared, put, used for a version, validated, published or refused."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from loramux.adapter_store.blobs import UPLOADS, BlobStore, canonical_key, packed_key, upload_key
from loramux.adapter_store.canonical import digest_of
from loramux.adapter_store.claims import Claims
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    AdapterRejected,
    BlobNotFound,
    UploadNotFound,
    UploadRefused,
)
from loramux.adapter_store.intake import Intake
from loramux.adapter_store.peft_config import MAX_CONFIG_BYTES
from loramux.adapter_store.records import (
    CONFIG_FILE,
    TENSORS_FILE,
    UPLOAD_FILES,
    AdapterVersion,
    Upload,
    UploadFile,
)
from loramux.adapter_store.registry import AdapterRegistry
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validator import Accepted, ValidationJob, Validator

LOST_AFTER_US = 3600 * 1_000_000
"""A version that was made so long ago and is still in validation is taken to be its server's no more."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = structlog.get_logger(__name__)


class Ingest:
    """Turns uploads into versions. Blocking: call it from threads.

    `scratch_dir` belongs to this process alone; what lies in it is removed by `recover`. A crash at any point leaves
    either nothing or a row that `recover` finishes or removes: blobs are put before the row that needs them is
    committed, and uploaded files are deleted after the row that no longer needs them is.

    Several servers may share a database and a blob store, each with a `scratch_dir` that outlives it: what a server
    was validating is noted there. A row does not say whose it is, so that two servers may validate one version at
    once, after a crash at the wrong moment or where its server seems lost. That costs work and nothing else: both
    reach the same verdict, one of them writes it, and only that one deletes the uploaded files.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        blobs: BlobStore,
        target: PackTarget,
        scratch_dir: Path,
        validator: Validator,
        upload_lifetime_s: int = 86_400,
    ) -> None:
        self._intake = Intake(registry.database)
        self._blobs = blobs
        self._target = target
        self._scratch_dir = scratch_dir
        self._claims = Claims(scratch_dir)
        self._stranded: set[str] = set()
        self._validator = validator
        self._lifetime_us = upload_lifetime_s * 1_000_000
        self._max_bytes = {CONFIG_FILE: MAX_CONFIG_BYTES, TENSORS_FILE: target.max_tensors_bytes}
        self.has_pending = threading.Event()
        """Set whenever a version may wait for `process`; IngestWorker waits on it."""

    def create_upload(self, adapter_id: str, files: Sequence[UploadFile]) -> Upload:
        """Announce the two files of a version. Raises AdapterNotFound or UploadRefused."""
        if sorted(file.name for file in files) != sorted(UPLOAD_FILES):
            raise UploadRefused(
                "invalid_files", f"an upload has exactly the files {' and '.join(UPLOAD_FILES)}", "files"
            )
        for file in files:
            if not 0 < file.size <= self._max_bytes[file.name]:
                raise UploadRefused(
                    "file_too_large" if file.size > 0 else "invalid_size",
                    f"{file.name} must have 1 to {self._max_bytes[file.name]} bytes, not {file.size}",
                    "size",
                )
            if not _SHA256.fullmatch(file.sha256):
                raise UploadRefused("invalid_sha256", "sha256 must have 64 hexadecimal digits, lower case", "sha256")
        return self._intake.open_upload(adapter_id, files, self._lifetime_us)

    def get_upload(self, upload_id: str) -> Upload | None:
        return self._intake.get_upload(upload_id)

    def put_file(self, upload_id: str, name: str, chunks: Iterable[bytes]) -> None:
        """Take the bytes of one file; they must be what was announced. Raises UploadNotFound or UploadRefused."""
        upload = self._intake.require_open(upload_id)
        file = next((file for file in upload.files if file.name == name), None)
        if file is None:
            raise UploadNotFound("the upload has no file of that name")
        scratch = self._scratch_dir / uuid.uuid4().hex
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        try:
            _write_verified(scratch, file, chunks)
            self._blobs.put(upload_key(upload_id, name), scratch)
        finally:
            scratch.unlink(missing_ok=True)

    def create_version(self, adapter_id: str, upload_id: str) -> AdapterVersion:
        """Use an upload; quick, since `process` does the work. Identical bytes give the existing version.

        Raises AdapterNotFound, UploadNotFound or UploadRefused.
        """
        upload = self._intake.get_upload(upload_id)
        if upload is not None and upload.adapter_id == adapter_id and upload.state == "open":
            self._intake.check_open(upload)
            for name in UPLOAD_FILES:
                if not self._blobs.exists(upload_key(upload_id, name)):
                    raise UploadRefused("upload_incomplete", f"{name} has not been uploaded yet", "upload_id")
        added = self._intake.add_version(adapter_id, upload_id)
        if added.upload_id != upload_id:
            self._delete_files(upload_id)
        self.has_pending.set()
        return added.version

    def process(self, version_id: str) -> AdapterVersion:
        """Take a pending version to ready or rejected; returns it unchanged where another worker has it.

        Raises StoreError where a store or the validation process fails; the version then waits for another try.
        """
        version = self._intake.get_version(version_id)
        if not self._claims.note(version_id):
            return version
        try:
            upload = self._intake.claim(version_id)
            has_verdict = upload is not None and self._reach_verdict(version, upload)
        except BaseException:
            self._give_back(version_id)
            raise
        self._claims.forget(version_id)
        if upload is not None and has_verdict:
            self._delete_files(upload.id)
        return self._intake.get_version(version_id)

    def pending_versions(self) -> list[str]:
        return self._intake.pending_versions()

    def recover(self) -> None:
        """Clear up after an earlier run, before anything else is done: its work is taken up again or removed.

        What another server is validating is left to it. A version whose server lost its `scratch_dir` is taken up by
        `remove_abandoned`, an hour after it was made.
        """
        for version_id in self._claims.noted():
            self._intake.give_back(version_id)
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self.remove_abandoned()
        self.has_pending.set()

    def give_back_stranded(self) -> None:
        """Let the versions wait again that could not be given back, because the database was down."""
        for version_id in tuple(self._stranded):
            self._intake.give_back(version_id)
            self._stranded.discard(version_id)
            self._claims.forget(version_id)

    def remove_abandoned(self) -> None:
        """Take up what a lost server left, and delete what no version needs: expired uploads and unfinished blobs."""
        self._intake.give_back_older(LOST_AFTER_US)
        self._blobs.remove_unfinished()
        keys = list(self._blobs.list_keys(UPLOADS))
        in_use = self._intake.uploads_in_use({_upload_id(key) for key in keys})
        for key in keys:
            if _upload_id(key) not in in_use:
                self._blobs.delete(key)

    def _reach_verdict(self, version: AdapterVersion, upload: Upload) -> bool:
        """Make the version ready or rejected; False where another server has done so, or will."""
        scratch = self._scratch_dir / version.id
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            return self._validate_and_publish(version, upload, scratch)
        except AdapterRejected as error:
            # Files are missing as well where another server's verdict came first, which then stands.
            return self._intake.reject(
                version.id, {"error": {"code": error.code, "message": error.message, "param": error.param}}
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _give_back(self, version_id: str) -> None:
        try:
            self._intake.give_back(version_id)
        except Exception as error:
            _log.warning("version_stranded", version_id=version_id, error=str(error))
            self._stranded.add(version_id)
        else:
            self._claims.forget(version_id)

    def _validate_and_publish(self, version: AdapterVersion, upload: Upload, scratch: Path) -> bool:
        job = ValidationJob(
            config=scratch / CONFIG_FILE,
            tensors=scratch / TENSORS_FILE,
            canonical=scratch / "canonical",
            packed=scratch / "packed",
        )
        for name in UPLOAD_FILES:
            try:
                self._blobs.get(upload_key(upload.id, name), scratch / name)
            except BlobNotFound:
                raise AdapterRejected("upload_incomplete", "the file was never uploaded", name) from None
        accepted = self._validator.validate(job, self._target)
        self._put(job, accepted)
        return self._intake.publish(
            version,
            accepted.digest,
            accepted.max_rank,
            accepted.num_pages,
            job.canonical.stat().st_size,
            accepted.report,
        )

    def _put(self, job: ValidationJob, accepted: Accepted) -> None:
        # The process that read a tenant's bytes is not taken at its word for the name they go by.
        if digest_of(job.canonical) != accepted.digest:
            raise AdapterCorrupt("the validation process wrote a file of another digest")
        self._blobs.put(canonical_key(accepted.digest), job.canonical)
        self._blobs.put(packed_key(accepted.digest, self._target.pack_key), job.packed)

    def _delete_files(self, upload_id: str) -> None:
        for name in UPLOAD_FILES:
            self._blobs.delete(upload_key(upload_id, name))


def _write_verified(path: Path, file: UploadFile, chunks: Iterable[bytes]) -> None:
    size = 0
    hashed = hashlib.sha256()
    with path.open("wb") as out:
        for chunk in chunks:
            size += len(chunk)
            if size > file.size:
                break
            hashed.update(chunk)
            out.write(chunk)
    if size != file.size:
        than = "more than" if size > file.size else f"{size} of"
        raise UploadRefused("size_mismatch", f"{than} the announced {file.size} bytes of {file.name} came", "size")
    if hashed.hexdigest() != file.sha256:
        raise UploadRefused("checksum_mismatch", f"the bytes of {file.name} have another SHA-256", "sha256")


def _upload_id(key: str) -> str:
    return key.removeprefix(UPLOADS).partition("/")[0]

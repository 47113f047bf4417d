"""An upload's path: declared, received, made into a version, validated, and published or rejected."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore, PresignedParts, PresignedPut, upload_key
from loramux.adapter_store.errors import (
    AdapterRejected,
    BlobNotFound,
    BlobTooLarge,
    PartsMissing,
    UploadNotFound,
    UploadRefused,
)
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, FURTHER_FILES, TENSORS_FILE, UPLOAD_FILES
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.further_files import MAX_FURTHER_BYTES
from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary
from loramux.adapter_store.ingest.base_validation import BaseValidation
from loramux.adapter_store.ingest.claims import LEASE_S, VersionClaims
from loramux.adapter_store.ingest.failpoints import Failpoint, FailpointHook, no_op
from loramux.adapter_store.ingest.file_validation import FileValidation
from loramux.adapter_store.ingest.janitor import delete_orphans
from loramux.adapter_store.ingest.kept_files import KeptFiles
from loramux.adapter_store.ingest.purge_rows import PurgeRows
from loramux.adapter_store.ingest.purged_blobs import PurgedBlobs
from loramux.adapter_store.ingest.pushes import Pushes
from loramux.adapter_store.ingest.tenant_caps import MAX_OPEN_LARGEST, TenantCaps
from loramux.adapter_store.ingest.turns import IngestTurns
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.ingest.version_processor import VersionProcessor
from loramux.adapter_store.registry.records import AdapterVersion, Upload, UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.validation.further_checks import (
    TemplateCheck,
    VocabularyCheck,
    accept_vocabulary,
    check_template_syntax,
)
from loramux.adapter_store.validation.peft_config import MAX_CONFIG_BYTES
from loramux.adapter_store.validation.validator import Validator

SOURCE_LIFETIME_S = 3600
"""How long an unreachable source is retried, in seconds."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Ingest:
    """Turns uploads into versions. Blocking: call it from threads.

    `scratch_dir` belongs to this process alone. `recover` empties it. After a crash at any of the points in
    `failpoints.py`, a server completes or removes the upload once any claim on its version has expired. Acknowledged
    versions survive.

    Any number of servers may share a database and a blob store, each with its own scratch directory. With `sources`, an
    operator can create versions from a bucket or a hub. `is_presigning` lets clients put their files into the blob
    store directly, if the store supports that. `check_template` decides whether an uploaded chat template can be
    served, and `check_vocabulary` decides whether the adapter's tokens can be added to the base's tokenizer. The
    tokenizers of sources are compared with `base_vocabulary`. Pushes are validated by `push_validator`, so that they do
    not wait for uploads; `Pushes` describes `warm_push` and `open_tier`.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        blobs: BlobStore,
        target: PackTarget,
        scratch_dir: Path,
        validator: Validator,
        upload_lifetime_s: int = 86_400,
        lease_s: float = LEASE_S,
        sources: AdapterSources | None = None,
        is_presigning: bool = True,
        check_template: TemplateCheck = check_template_syntax,
        check_vocabulary: VocabularyCheck = accept_vocabulary,
        base_vocabulary: BaseVocabulary | None = None,
        at_failpoint: FailpointHook = no_op,
        push_validator: Validator | None = None,
        warm_push: Callable[[], None] = lambda: None,
        open_tier: Callable[[], DiskTier] | None = None,
    ) -> None:
        self.base_facts = BaseFacts.of(target)
        """What a push must know about the base to convert an adapter of mlx-lm."""
        self._max_bytes = {CONFIG_FILE: MAX_CONFIG_BYTES, TENSORS_FILE: target.max_tensors_bytes, **MAX_FURTHER_BYTES}
        caps = TenantCaps(max_open_bytes=MAX_OPEN_LARGEST * sum(self._max_bytes.values()))
        self.upload_rows = UploadRows(registry.database, registry.limits, caps, registry.base_id)
        claims = VersionClaims(registry.database, lease_s, registry.limits, registry.base_id)
        self._turns = IngestTurns(registry.database, registry.base_id)
        validation = FileValidation(target, validator, check_template, check_vocabulary)
        self._blobs = blobs
        self._scratch_dir = scratch_dir
        self._sources = sources or AdapterSources()
        self._kept_files = KeptFiles(scratch_dir)

        def processor(validation: FileValidation) -> VersionProcessor:
            return VersionProcessor(
                registry.database,
                claims,
                blobs,
                validation,
                scratch_dir,
                self._sources,
                at_failpoint,
                base_vocabulary,
                self._kept_files,
            )

        self._processor = processor(validation)
        of_pushes = validation if push_validator is None else replace(validation, validator=push_validator)
        self.pushes = Pushes(
            self.upload_rows, claims, processor(of_pushes), scratch_dir, self._max_bytes, warm_push, open_tier
        )
        """Versions whose files arrive in one request."""
        self.for_base: BaseValidation | None = None
        """Validates, for this server's base, versions that were accepted for other bases.

        None if the registry has no base.
        """
        if registry.base_id is not None:
            self.for_base = BaseValidation(registry.database, blobs, validation, scratch_dir, registry.base_id, lease_s)
        self.purge_rows = PurgeRows(registry.database)
        self.purged_blobs = PurgedBlobs(registry.database, blobs)
        self._lifetime_s = upload_lifetime_s
        self._is_presigning = is_presigning
        self._at_failpoint = at_failpoint
        self.has_pending = threading.Event()
        """Set when a version may need `process`. IngestWorker waits for this event."""

    def create_upload(self, adapter_id: str, files: Sequence[UploadFile]) -> Upload:
        """Declare a version's two required files and any optional files.

        The declared sizes count against the tenant's quota immediately.

        Raises AdapterNotFound, UploadRefused, LimitReached, or the registry's limit errors.
        """
        further = [file.name for file in files if file.name in FURTHER_FILES]
        if sorted(file.name for file in files) != sorted({*UPLOAD_FILES, *further}):
            raise UploadRefused(
                "invalid_files",
                f"an upload must have the files {' and '.join(UPLOAD_FILES)}, "
                f"and can also have {', '.join(FURTHER_FILES)}",
                "files",
            )
        for file in files:
            if not 0 < file.size <= self._max_bytes[file.name]:
                raise UploadRefused(
                    "file_too_large" if file.size > 0 else "invalid_size",
                    f"{file.name} must have 1 to {self._max_bytes[file.name]} bytes",
                    "size",
                )
            if not _SHA256.fullmatch(file.sha256):
                raise UploadRefused("invalid_sha256", "sha256 must be 64 lowercase hexadecimal digits", "sha256")
        upload = self.upload_rows.open_upload(adapter_id, files, self._lifetime_s * 1_000_000)
        self._at_failpoint(Failpoint.UPLOAD_DECLARED)
        return upload

    def presign(self, upload: Upload) -> Mapping[str, PresignedPut | PresignedParts]:
        """Return signed requests that let the client put files into the blob store.

        Files for which there is no signed request must be sent to the server.

        If signing fails, the upload is deleted, because the client never receives the upload's identifier.
        """
        if not self._is_presigning:
            return {}
        try:
            return self._presign(upload)
        except Exception:
            self.upload_rows.cancel_upload(upload.adapter_id, upload.id)
            raise

    def cancel_upload(self, adapter_id: str, upload_id: str) -> None:
        """Delete an open upload and its files.

        Raises AdapterNotFound, UploadNotFound, or UploadRefused if a version uses it.
        """
        upload = self.upload_rows.cancel_upload(adapter_id, upload_id)
        self._kept_files.forget(upload_id)
        # If the store fails here, the janitor removes the remaining files.
        for file in upload.files:
            key = upload_key(upload_id, file.name)
            if file.parts_id is not None:
                self._blobs.abort_parts(key, file.parts_id)
            self._blobs.delete(key)

    def put_file(self, upload_id: str, name: str, chunks: Iterable[bytes], num_bytes: int | None = None) -> None:
        """Receive one file, whose bytes must match the declaration. A client can send a file again.

        If the caller passes `num_bytes`, it is checked before any byte is read. Raises UploadNotFound or UploadRefused.
        """
        upload = self.upload_rows.require_open(upload_id)
        file = next((file for file in upload.files if file.name == name), None)
        if file is None:
            raise UploadNotFound("the upload has no file of that name")
        if num_bytes is not None and num_bytes != file.size:
            raise UploadRefused("size_mismatch", f"{file.name} was declared with a different size", "size")
        scratch = self._scratch_dir / uuid.uuid4().hex
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        try:
            _write_verified(scratch, file, chunks)
            self._at_failpoint(Failpoint.FILE_RECEIVED)
            self._keep(upload_id, file, scratch)
            self._at_failpoint(Failpoint.FILE_STORED)
            self._check_still_open(upload_id, name)
            self._kept_files.keep(upload_id, name, scratch)
        finally:
            scratch.unlink(missing_ok=True)

    def create_version(self, adapter_id: str, upload_id: str) -> AdapterVersion:
        """Create a version from an upload, or return an existing version with identical files.

        `process` does the slow work.

        Raises AdapterNotFound, UploadNotFound, UploadRefused or LimitReached.
        """
        upload = self.upload_rows.get_upload(upload_id)
        if upload is not None and upload.adapter_id == adapter_id and upload.state == "open":
            self.upload_rows.check_open(upload)
            self._check_complete(upload)
        added = self.upload_rows.add_version(adapter_id, upload_id)
        self._at_failpoint(Failpoint.VERSION_ADDED)
        if added.upload_id != upload_id:
            self._kept_files.forget(upload_id)
            for name in (*UPLOAD_FILES, *FURTHER_FILES):
                self._blobs.delete(upload_key(upload_id, name))
        self.has_pending.set()
        return added.version

    def check_source(self, source_url: str) -> None:
        """Raise AdapterRejected if a source has no configuration. Raises what `create_version_from` raises, too."""
        if not self._sources.open(source_url).has(CONFIG_FILE):
            raise AdapterRejected("source_not_found", "the source has no such file", CONFIG_FILE)

    def create_version_from(self, adapter_id: str, source_url: str) -> AdapterVersion:
        """Create a version from files in an allowed bucket or hub repository, for a platform administrator.

        A hub revision's current commit is recorded. If the revision moves before the files are fetched, the version is
        rejected. Raises AdapterNotFound, UploadRefused, AdapterRejected, or SourceUnavailable if the hub cannot be
        reached.
        """
        version = self.upload_rows.add_version_from(
            adapter_id, self._sources.pin(source_url), SOURCE_LIFETIME_S * 1_000_000
        )
        self._at_failpoint(Failpoint.VERSION_ADDED)
        self.has_pending.set()
        return version

    def process(self, version_id: str) -> AdapterVersion:
        """Validate a version, then publish or reject it.

        Returns the version unchanged if this server cannot claim it, for example because it has a verdict or another
        server has claimed it.

        Raises StoreError if a store or the validation process fails. The version is then retried later.
        """
        return self._processor.process(version_id)

    def next_waiting(self, but: Collection[str] = ()) -> str | None:
        return self._turns.next(but)

    def recover(self) -> None:
        """Clean up after an earlier run. Call this method before any other.

        Versions that the earlier run was validating are resumed, by this server or another, once their claims have
        expired.
        """
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self.remove_abandoned()
        self.has_pending.set()

    def remove_abandoned(self) -> None:
        """Delete the files of abandoned uploads and the blobs of purged versions."""
        kept = self._kept_files.upload_ids
        for upload_id in kept - self.upload_rows.uploads_in_use(kept):
            self._kept_files.forget(upload_id)
        delete_orphans(self.upload_rows, self._blobs)
        self.purged_blobs.clear_up()

    def _presign(self, upload: Upload) -> Mapping[str, PresignedPut | PresignedParts]:
        requests: dict[str, PresignedPut | PresignedParts] = {}
        for file in upload.files:
            key = upload_key(upload.id, file.name)
            request = self._blobs.presign_put(
                key, file.size, file.sha256, self._lifetime_s
            ) or self._blobs.presign_parts(key, file.size, self._lifetime_s)
            if request is not None:
                requests[file.name] = request
        parts_ids = {name: found.upload_id for name, found in requests.items() if isinstance(found, PresignedParts)}
        if parts_ids:
            self.upload_rows.note_parts(upload, parts_ids)
        return requests

    def _keep(self, upload_id: str, file: UploadFile, scratch: Path) -> None:
        key = upload_key(upload_id, file.name)
        if self._blobs.put(key, scratch):
            return
        # The key is taken, either by an earlier upload of this file or by a different blob that the client put there.
        there = scratch.with_suffix(".there")
        try:
            self._blobs.get(key, there, file.size)
            is_same = digest_of(there) == file.sha256
        except (BlobNotFound, BlobTooLarge):
            is_same = False
        finally:
            there.unlink(missing_ok=True)
        if not is_same:
            self._blobs.delete(key)
            self._blobs.put(key, scratch)

    def _check_still_open(self, upload_id: str, name: str) -> None:
        """Raise UploadRefused if the upload was used or has expired while its file was being received, in which case
        the janitor removes the file. Raises UploadNotFound if the upload was cancelled.
        """
        try:
            self.upload_rows.require_open(upload_id)
        except UploadNotFound:
            # The upload's other files are already deleted.
            self._kept_files.forget(upload_id)
            self._blobs.delete(upload_key(upload_id, name))
            raise

    def _check_complete(self, upload: Upload) -> None:
        for file in upload.files:
            if self._kept_files.has(upload.id, file.name):
                continue
            size = self._size_of(upload, file)
            if size == file.size:
                continue
            found = self.upload_rows.get_upload(upload.id)
            if found is not None and found.state == "used":
                # Another call has already created a version, which may even be ready or rejected by now.
                return
            if size is None:
                raise UploadRefused("upload_incomplete", f"{file.name} has not been uploaded yet", "upload_id")
            raise UploadRefused("size_mismatch", f"{file.name} does not have the declared size", "upload_id")

    def _size_of(self, upload: Upload, file: UploadFile) -> int | None:
        key = upload_key(upload.id, file.name)
        found = self._blobs.head(key)
        if found is None and file.parts_id is not None:
            try:
                self._blobs.complete_parts(key, file.parts_id, file.size)
            except (PartsMissing, BlobNotFound):
                return None
            found = self._blobs.head(key)
        return None if found is None else found.size


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
        amount = "more" if size > file.size else "fewer"
        raise UploadRefused("size_mismatch", f"{file.name} has {amount} bytes than declared", "size")
    if hashed.hexdigest() != file.sha256:
        raise UploadRefused("checksum_mismatch", f"the SHA-256 of {file.name} does not match", "sha256")

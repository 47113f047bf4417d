"""Validates a claimed version, and publishes or rejects it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key, upload_key
from loramux.adapter_store.errors import (
    AdapterRejected,
    BlobNotFound,
    BlobTooLarge,
    ClaimLost,
    SourceUnavailable,
    StoreError,
    UploadRefused,
)
from loramux.adapter_store.formats.files.file_names import (
    CONFIG_FILE,
    EARLIER_TEMPLATE_FILE,
    FURTHER_FILES,
    SMALL_TOKENIZER_FILES,
    TEMPLATE_FILE,
    TENSORS_FILE,
    UPLOAD_FILES,
)
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.version_files.further_files import MAX_FURTHER_BYTES
from loramux.adapter_store.formats.version_files.tokenizer_files import MAX_BYTES, BaseVocabulary, tokenizer_files
from loramux.adapter_store.ingest.claims import ClaimedVersion, ClaimRenewal, Verdict, VersionClaims
from loramux.adapter_store.ingest.failpoints import Failpoint, FailpointHook
from loramux.adapter_store.ingest.file_validation import FileValidation, ValidFiles
from loramux.adapter_store.ingest.kept_files import KeptFiles
from loramux.adapter_store.ingest.originals import KeptHeader, config_key, header_key
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import AdapterVersion, Upload, UploadFile
from loramux.adapter_store.sources.adapter_sources import AdapterSources, Source
from loramux.adapter_store.sources.sharded_source import JoinedSource
from loramux.adapter_store.validation.peft_config import MAX_CONFIG_BYTES
from loramux.adapter_store.validation.validator import Accepted, ValidationJob
from loramux.migrations.database import Database

SOURCE_RETRY_S = 30.0
"""Delay before an unreadable source is retried, in seconds. Other versions are processed in the meantime."""

_log = structlog.get_logger(__name__)


PushStage: TypeAlias = Literal["validate", "store", "ready"]
"""The stages of a version from local files: the verdict, all blobs that cannot be rebuilt, and the published version.
"""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a version in a directory of this server. `ValidationJob` describes `needs_effect`.

    `hand_over` receives the digest and the packed file of an accepted version before any blob is stored, and returns
    whether an engine can now load the version without the blob store. `passed` is called at the end of each stage.
    """

    directory: Path
    needs_effect: bool
    hand_over: Callable[[str, Path], bool]
    passed: Callable[[PushStage], None]


class VersionProcessor:
    """Claims a version and validates it, then stores its blobs and publishes it, or rejects it.

    `scratch_dir` belongs to this process alone. The processor hashes, validates and publishes its own copies of the
    uploaded blobs, so later changes to these blobs have no effect.
    """

    def __init__(
        self,
        database: Database,
        claims: VersionClaims,
        blobs: BlobStore,
        validation: FileValidation,
        scratch_dir: Path,
        sources: AdapterSources,
        at_failpoint: FailpointHook,
        base_vocabulary: BaseVocabulary | None,
        kept_files: KeptFiles,
    ) -> None:
        self._database = database
        self._upload_rows = UploadRows(database)
        self._claims = claims
        self._blobs = blobs
        self._validation = validation
        self._scratch_dir = scratch_dir
        self._sources = sources
        self._at_failpoint = at_failpoint
        self._base_vocabulary = base_vocabulary
        self._kept_files = kept_files

    def process(self, version_id: str) -> AdapterVersion:
        """Publish, reject or postpone a version. Return it unchanged if this server cannot claim it
        (`VersionClaims.claim_version`).

        Raises StoreError if a store or the validation process fails. The version is then retried later.
        """
        claimed = self._claims.claim_version(version_id)
        if claimed is None:
            return self._upload_rows.get_version(version_id)
        self._at_failpoint(Failpoint.CLAIMED)
        return self.process_files(claimed)

    def process_files(self, claimed: ClaimedVersion, local: LocalFiles | None = None) -> AdapterVersion:
        """Publish or reject a claimed version, from local files, which are as its upload states, if there are any.

        Raises StoreError if a store or the validation process fails.
        """
        version_id = claimed.version.id
        try:
            with ClaimRenewal(self._claims, version_id):
                self._decide(claimed, local)
        except ClaimLost:
            _log.warning("claim_lost", version_id=version_id)
        except SourceUnavailable as error:
            _log.warning("source_unavailable", version_id=version_id, error=str(error))
            self._postpone(claimed)
        except BaseException:
            self._give_back(version_id)
            raise
        else:
            if local is None:
                self._delete_files(claimed.upload)
        return self._upload_rows.get_version(version_id)

    def _decide(self, claimed: ClaimedVersion, local: LocalFiles | None) -> None:
        version_id = claimed.version.id
        scratch = self._scratch_dir / version_id
        unstored = None
        try:
            if local is not None:
                unstored = self._validate_and_put(claimed, local.directory, {}, local.needs_effect, local)
            # An earlier attempt may have stored all blobs before its server died.
            elif not self._is_stored(claimed.version):
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
                self._fetch_and_put(claimed, scratch)
            self._claims.publish(claimed.version)
            self._at_failpoint(Failpoint.PUBLISHED)
            if local is not None:
                local.passed("ready")
            if unstored is not None:
                self._put_packed(unstored)
        except AdapterRejected as error:
            self._reject(version_id, error)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fetch_and_put(self, claimed: ClaimedVersion, scratch: Path) -> None:
        facts: dict[str, Any] = {}
        source_url = claimed.upload.source_url
        if source_url is None:
            self._fetch(claimed, scratch)
        else:
            try:
                facts = self._fetch_source(claimed, source_url, scratch)
            except (StoreError, SQLAlchemyError, OSError):
                raise
            except Exception as error:
                # Malformed files may fail each time, and each attempt copies the source again.
                raise SourceUnavailable(f"reading it failed: {type(error).__name__}: {error}") from error
        self._at_failpoint(Failpoint.FILES_FETCHED)
        self._validate_and_put(claimed, scratch, facts, needs_effect=source_url is None)

    def _validate_and_put(
        self,
        claimed: ClaimedVersion,
        scratch: Path,
        facts: dict[str, Any],
        needs_effect: bool,
        local: LocalFiles | None = None,
    ) -> ValidFiles | None:
        """Validate the files in `scratch`, and store all blobs that cannot be rebuilt.

        Returns the files if the packed file was handed over and is not stored yet.
        """
        valid = self._validation.validate(scratch, needs_effect=needs_effect)
        job, accepted = valid.job, valid.accepted
        kept = KeptHeader.of(job.tensors, job.canonical)
        self._at_failpoint(Failpoint.VALIDATED)
        self._claims.accept(
            claimed.version,
            Verdict(
                accepted.digest,
                accepted.max_rank,
                accepted.num_pages,
                job.canonical.stat().st_size,
                accepted.report | valid.further.report() | facts,
                valid.further,
                accepted.invocation_tokens,
                accepted.task,
            ),
        )
        self._at_failpoint(Failpoint.ACCEPTED)
        if local is not None:
            local.passed("validate")
        is_handed_over = local is not None and job.packed.exists() and local.hand_over(accepted.digest, job.packed)
        self._put(claimed.version, job, accepted, kept)
        if local is not None:
            local.passed("store")
        if is_handed_over:
            return valid
        if job.packed.exists():
            self._blobs.put(packed_key(accepted.digest, self._validation.target.pack_key), job.packed)
        self._at_failpoint(Failpoint.PACKED_STORED)
        return None

    def _put_packed(self, valid: ValidFiles) -> None:
        """Store the packed file of a ready version. Without it, other engines pack the canonical file themselves."""
        try:
            self._blobs.put(packed_key(valid.accepted.digest, self._validation.target.pack_key), valid.job.packed)
        except Exception as error:
            _log.warning("packed_file_not_stored", digest=valid.accepted.digest, error=str(error))

    def _fetch(self, claimed: ClaimedVersion, scratch: Path) -> None:
        for file in claimed.upload.files:
            if self._kept_files.take(claimed.upload.id, file.name, scratch / file.name):
                continue
            try:
                self._blobs.get(upload_key(claimed.upload.id, file.name), scratch / file.name, file.size)
            except BlobNotFound:
                raise AdapterRejected("upload_incomplete", "the file was never uploaded", file.name) from None
            except BlobTooLarge:
                raise AdapterRejected("size_mismatch", "the file is larger than declared", file.name) from None
            if (scratch / file.name).stat().st_size != file.size:
                raise AdapterRejected("size_mismatch", "the file is smaller than declared", file.name)
            # Clients can put files into the bucket directly, so verify the checksum that they declared.
            if digest_of(scratch / file.name) != file.sha256:
                raise AdapterRejected("checksum_mismatch", "the SHA-256 does not match", file.name)

    def _fetch_source(self, claimed: ClaimedVersion, url: str, scratch: Path) -> dict[str, Any]:
        """Copy the files of a source, and return the source's facts for the report."""
        target = self._validation.target
        tensors_bytes = target.max_tensors_bytes
        max_bytes = {CONFIG_FILE: MAX_CONFIG_BYTES, TENSORS_FILE: tensors_bytes, **MAX_FURTHER_BYTES}
        try:
            source = JoinedSource(self._sources.open(url), scratch, target)
        except UploadRefused as error:
            raise AdapterRejected(error.code, error.message, error.param) from None
        names = (*UPLOAD_FILES, *(name for name in FURTHER_FILES if source.has(name)))
        num_bytes = {name: source.size(name, max_bytes[name]) for name in names}
        self._claims.announce(claimed, num_bytes)
        for name in names:
            source.fetch_file(name, scratch / name, num_bytes[name])
        own = self._fetch_tokenizer(source, scratch)
        found = [
            UploadFile(name, (scratch / name).stat().st_size, digest_of(scratch / name))
            for name in dict.fromkeys((*names, *own))
        ]
        self._claims.record_files(claimed, found)
        self._at_failpoint(Failpoint.SOURCE_RECORDED)
        return source.facts

    def _fetch_tokenizer(self, source: Source, scratch: Path) -> tuple[str, ...]:
        """Write the optional files that follow from a source's tokenizer, and return their names.

        Only the tokenizer's small files are read, which list templates and added tokens. The adapter's tensors are not
        read here, so added tokens need an embedding that was not resized.
        """
        base = self._base_vocabulary
        names = [name for name in SMALL_TOKENIZER_FILES if source.has(name)]
        if base is None or not names:
            return ()
        for name in names:
            # Its template counts only if there is no other. It is ignored if it cannot be read, as in a push.
            is_optional = name == EARLIER_TEMPLATE_FILE
            if is_optional and source.has(TEMPLATE_FILE):
                continue
            try:
                num_bytes = source.size(name, MAX_BYTES[name])
            except AdapterRejected as error:
                if is_optional and error.code == "file_too_large":
                    continue
                raise
            source.fetch_file(name, scratch / name, num_bytes)
        files = tokenizer_files(scratch, base, num_rows=base.vocab_size)
        for file_name, content in files.items():
            (scratch / file_name).write_bytes(content)
        return tuple(files)

    def _put(self, version: AdapterVersion, job: ValidationJob, accepted: Accepted, kept: KeptHeader) -> None:
        """Store an accepted version's blobs, except the packed file.

        Once the canonical file exists, all blobs that cannot be rebuilt are stored.
        """
        # Stop here if another server has taken over the version.
        self._claims.renew(version.id)
        if version.digest is not None:
            # An earlier attempt may have reached this point when the source contained different files.
            self._delete_originals(version.id)
        self._blobs.put(config_key(version.id), job.config)
        self._at_failpoint(Failpoint.CONFIG_KEPT)
        self._blobs.put(header_key(version.id), kept.encode())
        self._at_failpoint(Failpoint.HEADER_KEPT)
        self._blobs.put(canonical_key(accepted.digest), job.canonical)
        self._at_failpoint(Failpoint.CANONICAL_STORED)

    def _reject(self, version_id: str, error: AdapterRejected) -> None:
        self._claims.renew(version_id)
        self._delete_originals(version_id)
        refusal = {"code": error.code, "message": error.message, "param": error.param}
        self._claims.reject(version_id, {**error.report, "error": refusal})
        self._at_failpoint(Failpoint.REJECTED)

    def _is_stored(self, version: AdapterVersion) -> bool:
        """Return whether all blobs that cannot be rebuilt exist. If so, the uploaded files are no longer needed."""
        if version.digest is None:
            return False
        keys = (config_key(version.id), header_key(version.id), canonical_key(version.digest))
        return all(self._blobs.exists(key) for key in keys)

    def _delete_originals(self, version_id: str) -> None:
        for key in (config_key(version_id), header_key(version_id)):
            self._blobs.delete(key)

    def _postpone(self, claimed: ClaimedVersion) -> None:
        """Postpone a version with an unreadable source, or reject it once its upload has expired."""
        version_id = claimed.version.id
        if self._database.now_us() < claimed.upload.expires_us:
            self._give_back(version_id, SOURCE_RETRY_S)
            return
        try:
            self._reject(version_id, AdapterRejected("source_unavailable", "the source could not be read", "source"))
        except Exception as failure:
            _log.warning("claim_left", version_id=version_id, error=str(failure))

    def _give_back(self, version_id: str, delay_s: float = 0.0) -> None:
        try:
            self._claims.give_back(version_id, delay_s)
        except Exception as error:
            # The database is down, or another server has the claim. Any server can take over the version when the claim
            # expires.
            _log.warning("claim_left", version_id=version_id, error=str(error))

    def _delete_files(self, upload: Upload) -> None:
        further = {file.name for file in upload.files}.intersection(FURTHER_FILES)
        try:
            for name in (*UPLOAD_FILES, *sorted(further)):
                self._blobs.delete(upload_key(upload.id, name))
                if name == UPLOAD_FILES[0]:
                    self._at_failpoint(Failpoint.FIRST_FILE_DELETED)
        except Exception as error:
            # The version has its verdict. The janitor deletes the files later.
            _log.warning("upload_left", upload_id=upload.id, error=str(error))
        self._at_failpoint(Failpoint.FILES_DELETED)

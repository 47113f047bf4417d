"""Validates, for this server's base, versions that were accepted for another base."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import structlog

from loramux.adapter_store.blobs.interface import BlobStore, packed_key
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    AdapterRejected,
    BlobStoreUnavailable,
    ClaimLost,
    OriginalNotKept,
    VersionNotReady,
)
from loramux.adapter_store.ingest.base_claims import BaseClaims, BaseTurns
from loramux.adapter_store.ingest.claims import LEASE_S, ClaimRenewal
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.file_validation import FileValidation
from loramux.adapter_store.registry.bases import Base, Bases
from loramux.adapter_store.registry.records import AdapterVersion, BaseVerdict
from loramux.migrations.database import Database

_log = structlog.get_logger(__name__)


class BaseValidation:
    """Validates ready versions for `base_id`, from the files as they were uploaded. Blocking.

    A verdict affects only this base. The versions keep their state, and servers of other bases keep serving them.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        validation: FileValidation,
        scratch_dir: Path,
        base_id: str,
        lease_s: float = LEASE_S,
    ) -> None:
        self._bases = Bases(database)
        self._claims = BaseClaims(database, base_id, lease_s)
        self._turns = BaseTurns(database, base_id)
        self._export = VersionExport(database, blobs, scratch_dir)
        self._blobs = blobs
        self._validation = validation
        self._scratch_dir = scratch_dir
        self._base_id = base_id

    def next_waiting(self, but: Collection[str] = ()) -> str | None:
        """Return the next version without a verdict that is not in `but`, or None if there is none."""
        return self._turns.next(but)

    def process(self, version_id: str) -> BaseVerdict:
        """Validate a version for the base, and return its verdict.

        The verdict stays `pending` if another server has claimed the version, or if the version is out of service.
        Raises StoreError if a store or the validation process fails. The version is then retried later.
        """
        version = self._claims.claim_version(version_id)
        if version is None:
            return self._bases.verdict(version_id, self._base_id)
        try:
            with ClaimRenewal(self._claims, version_id):
                self._decide(version)
        except ClaimLost:
            _log.warning("claim_lost", version_id=version_id, base_id=self._base_id)
        except VersionNotReady:
            # The version was taken out of service in the meantime.
            self._give_back(version_id)
        except BaseException:
            self._give_back(version_id)
            raise
        return self._bases.verdict(version_id, self._base_id)

    def progress(self) -> Base:
        """Return the base, with the numbers of versions by verdict. Raises BaseNotFound if it is not registered."""
        return self._bases.get(self._base_id)

    def _decide(self, version: AdapterVersion) -> None:
        scratch = self._scratch_dir / f"{version.id}-base"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            self._validate(version, scratch)
            self._claims.accept(version.id)
        except AdapterRejected as error:
            at = "" if error.param is None else f" ({error.param})"
            self._claims.reject(version.id, error.code, f"{error.message}{at}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _export_to(self, version: AdapterVersion, scratch: Path) -> None:
        try:
            for declared in self._export.files(version):
                with self._export.open(version, declared.name) as file, (scratch / declared.name).open("wb") as out:
                    out.writelines(file.chunks())
        except OriginalNotKept as error:
            raise AdapterRejected("original_not_kept", str(error)) from None
        except AdapterCorrupt as error:
            if isinstance(error, BlobStoreUnavailable):
                raise
            raise AdapterRejected("stored_files_damaged", str(error)) from None

    def _validate(self, version: AdapterVersion, scratch: Path) -> None:
        self._export_to(version, scratch)
        valid = self._validation.validate(scratch, needs_effect=False)
        assert version.digest is not None
        if valid.accepted.digest != version.digest:
            # Engines load the stored canonical file, but the checks for this base have accepted a different one.
            raise AdapterRejected(
                "base_mismatch", "for this base, the same files yield a different adapter: upload it under another name"
            )
        if valid.job.packed.exists():
            self._blobs.put(packed_key(version.digest, self._validation.target.pack_key), valid.job.packed)

    def _give_back(self, version_id: str) -> None:
        try:
            self._claims.give_back(version_id)
        except Exception as error:
            # The database is down, or another server has the claim. If this server still has it, the claim expires.
            _log.warning("claim_left", version_id=version_id, error=str(error))

"""SQL for uploads, and for versions before a server claims them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, not_, or_, select, update

from loramux.adapter_store.errors import UploadNotFound, UploadRefused, VersionNotFound
from loramux.adapter_store.formats.files.file_names import FURTHER_FILES, UPLOAD_FILES
from loramux.adapter_store.ingest.purge_rows import last_number
from loramux.adapter_store.ingest.tenant_caps import TenantCaps
from loramux.adapter_store.registry.records import UNFINISHED, AdapterVersion, Upload, UploadFile, UploadState
from loramux.adapter_store.registry.registry import (
    StockLimits,
    is_identifier,
    lock_adapter,
    lock_tenant,
    owner_of,
    select_versions,
    version_of,
)
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import adapter_versions, uploads

OTHER_BASE_WAIT_US = 600_000_000
"""How long only servers of the receiving server's base may validate a new version, in microseconds."""
_MAX_NAMES = 500
"""Maximum number of identifiers in one query."""


@dataclass(frozen=True, slots=True)
class AddedVersion:
    version: AdapterVersion
    upload_id: str


class UploadRows:
    """Changes the state of uploads and creates versions. Each change is one transaction.

    `base_id` is the base that this server serves. Servers of this base are the first to validate the new versions.
    """

    def __init__(
        self,
        database: Database,
        limits: StockLimits | None = None,
        caps: TenantCaps | None = None,
        base_id: str | None = None,
    ) -> None:
        self._database = database
        self._limits = limits
        self._caps = caps
        self._base_id = base_id

    def open_upload(self, adapter_id: str, files: Sequence[UploadFile], lifetime_us: int) -> Upload:
        """Open an upload.

        Raises AdapterNotFound, LimitReached, or `limits.refusal` if its bytes exceed the tenant's quota.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            tenant_id = _lock_owner(connection, adapter_id)
            num_bytes, now_us = sum(file.size for file in files), self._database.now_us(connection)
            if self._caps is not None:
                self._caps.check_upload(connection, tenant_id, num_bytes, now_us)
            if self._limits is not None:
                self._limits.admit(connection, tenant_id, "adapter_bytes", num_bytes, now_us)
            return self._insert_upload(connection, adapter_id, files, "open", None, lifetime_us)

    def cancel_upload(self, adapter_id: str, upload_id: str) -> Upload:
        """Delete an upload and return it.

        Raises AdapterNotFound, UploadNotFound, or UploadRefused if a version uses it.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            upload = _own_upload(connection, adapter_id, upload_id)
            if upload.state != "open":
                raise _already_used()
            connection.execute(delete(uploads).where(uploads.c.id == upload_id))
        return upload

    def list_open(
        self, adapter_id: str, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[Upload]:
        """List an adapter's open uploads, newest first. `after` and `before` are upload identifiers."""
        with self._database.read() as connection:
            is_open = (uploads.c.state == "open") & (uploads.c.expires_us > self._database.now_us(connection))
            query = select(uploads).where(uploads.c.adapter_id == adapter_id, is_open)
            return keyset_page(connection, query, uploads.c.id, upload_of, limit, after, before)

    def note_parts(self, upload: Upload, parts_ids: Mapping[str, str]) -> None:
        """Record the blob store's IDs for the multipart uploads of an open upload's files."""
        files = [asdict(replace(file, parts_id=parts_ids.get(file.name))) for file in upload.files]
        with self._database.write() as connection:
            connection.execute(update(uploads).where(uploads.c.id == upload.id).values(files=files))

    def get_upload(self, upload_id: str) -> Upload | None:
        if not is_identifier(upload_id):
            return None
        with self._database.read() as connection:
            row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
        return upload_of(row) if row else None

    def require_open(self, upload_id: str) -> Upload:
        """Return an open upload. Raises UploadNotFound, or UploadRefused if the upload is used or has expired."""
        upload = self.get_upload(upload_id)
        if upload is None:
            raise UploadNotFound("there is no such upload")
        self.check_open(upload)
        return upload

    def check_open(self, upload: Upload) -> None:
        """Raise UploadRefused if the upload is already used or has expired."""
        _check_open(upload, self._database.now_us())

    def add_version(self, adapter_id: str, upload_id: str) -> AddedVersion:
        """Create a new pending version from an upload.

        If a version was already created from the upload, or a version that was not rejected has identical files, that
        version is returned instead, even if it is out of service. A version that was taken out of service therefore
        cannot return under a new number. The upload's bytes were checked against the quota when the upload was opened.
        Raises AdapterNotFound, UploadNotFound, UploadRefused for an expired upload, or LimitReached.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            upload = _own_upload(connection, adapter_id, upload_id)
            added = _existing_version(connection, upload)
            if added is None:
                tenant_id = _lock_owner(connection, adapter_id)
                now_us = self._database.now_us(connection)
                _check_open(upload, now_us)
                if self._caps is not None:
                    self._caps.check_version(connection, tenant_id)
                added = _insert_version(connection, upload, now_us, self._base_id)
            if upload.state == "open":
                connection.execute(update(uploads).where(uploads.c.id == upload_id).values(state="used"))
        return added

    def add_pushed_version(self, upload: Upload, server_id: str, lease_us: int) -> AddedVersion:
        """Record the files of a push, and create a version that `server_id` has already claimed.

        If a version that was not rejected has identical files, that version is returned instead.
        Raises AdapterNotFound, UploadNotFound, UploadRefused for an expired upload, or LimitReached.
        """
        with self._database.write() as connection:
            lock_adapter(connection, upload.adapter_id)
            found = _existing_version(connection, upload)
            if found is not None:
                return found
            present = _own_upload(connection, upload.adapter_id, upload.id)
            tenant_id = _lock_owner(connection, upload.adapter_id)
            now_us = self._database.now_us(connection)
            _check_open(present, now_us)
            if self._caps is not None:
                self._caps.check_version(connection, tenant_id)
            declared = [asdict(file) for file in upload.files]
            connection.execute(update(uploads).where(uploads.c.id == upload.id).values(files=declared, state="used"))
            claim = {"state": "validating", "claimed_by": server_id, "claim_expires_us": now_us + lease_us}
            return _insert_version(connection, upload, now_us, self._base_id, claim)

    def discard_upload(self, upload_id: str) -> None:
        """Delete an upload, unless a version uses it."""
        with self._database.write() as connection:
            connection.execute(delete(uploads).where(uploads.c.id == upload_id, uploads.c.state == "open"))

    def add_version_from(self, adapter_id: str, source_url: str, lifetime_us: int) -> AdapterVersion:
        """Create a pending version, whose files a server fetches from `source_url` within `lifetime_us` microseconds.

        If an earlier version from that source has no verdict yet, that version is returned. Raises AdapterNotFound.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            on_its_way = (
                select(adapter_versions.c.id)
                .join(uploads, uploads.c.id == adapter_versions.c.upload_id)
                .where(
                    adapter_versions.c.adapter_id == adapter_id,
                    adapter_versions.c.state.in_(UNFINISHED),
                    uploads.c.source_url == source_url,
                )
            )
            version_id = connection.execute(on_its_way).scalar()
            if version_id is not None:
                return _version(connection, version_id)
            upload = self._insert_upload(connection, adapter_id, (), "used", source_url, lifetime_us)
            return _insert_version(connection, upload, upload.created_us, self._base_id).version

    def get_version(self, version_id: str) -> AdapterVersion:
        row = None
        if is_identifier(version_id):
            with self._database.read() as connection:
                row = connection.execute(select_versions().where(adapter_versions.c.id == version_id)).first()
        if row is None:
            raise VersionNotFound("there is no such version")
        return version_of(row)

    def upload_of_version(self, version_id: str) -> Upload:
        query = (
            select(uploads)
            .join(adapter_versions, adapter_versions.c.upload_id == uploads.c.id)
            .where(adapter_versions.c.id == version_id)
        )
        with self._database.read() as connection:
            row = connection.execute(query).first() if is_identifier(version_id) else None
        if row is None:
            raise VersionNotFound("there is no such version")
        return upload_of(row)

    def uploads_in_use(self, upload_ids: Collection[str]) -> set[str]:
        """Return the uploads whose files are still needed: open uploads, and uploads of versions without a verdict."""
        wanted: set[str] = set()
        asked = sorted(upload_id for upload_id in upload_ids if is_identifier(upload_id))
        for start in range(0, len(asked), _MAX_NAMES):
            wanted |= self._in_use(asked[start : start + _MAX_NAMES])
        return wanted

    def forget_expired(self, age_us: int) -> None:
        """Delete the rows of unused uploads that expired more than `age_us` microseconds ago."""
        with self._database.write() as connection:
            expired_us = self._database.now_us(connection) - age_us
            connection.execute(delete(uploads).where(uploads.c.state == "open", uploads.c.expires_us < expired_us))

    def _in_use(self, upload_ids: Sequence[str]) -> set[str]:
        # Use one statement: between two statements, a version could start to use the upload.
        unfinished = select(adapter_versions.c.upload_id).where(adapter_versions.c.state.in_(UNFINISHED))
        with self._database.read() as connection:
            is_open = (uploads.c.state == "open") & (uploads.c.expires_us > self._database.now_us(connection))
            query = select(uploads.c.id).where(uploads.c.id.in_(upload_ids), is_open | uploads.c.id.in_(unfinished))
            return {row.id for row in connection.execute(query)}

    def _insert_upload(
        self,
        connection: Connection,
        adapter_id: str,
        files: Sequence[UploadFile],
        state: UploadState,
        source_url: str | None,
        lifetime_us: int,
    ) -> Upload:
        upload_id = new_id("upl")
        now_us = self._database.now_us(connection)
        connection.execute(
            insert(uploads).values(
                id=upload_id,
                adapter_id=adapter_id,
                files=[asdict(file) for file in files],
                state=state,
                source_url=source_url,
                created_us=now_us,
                expires_us=now_us + lifetime_us,
            )
        )
        return Upload(upload_id, adapter_id, tuple(files), state, now_us, now_us + lifetime_us, source_url)


def is_for_base(base_id: str | None, now_us: int) -> ColumnElement[bool]:
    """Match pending versions that a server of this base may claim.

    For the first OTHER_BASE_WAIT_US after its creation, a version is left to servers of the receiving server's base,
    because it may fit only that base.
    """
    columns = adapter_versions.c
    is_overdue = not_(columns.created_us.between(now_us - OTHER_BASE_WAIT_US, now_us))
    return or_(columns.base_id.is_(None), columns.base_id == base_id, is_overdue)


def files_sha256(files: Collection[UploadFile]) -> str | None:
    """Return the SHA-256 of an upload's file checksums, which is equal for identical uploads, or None without files."""
    checksums = {file.name: file.sha256 for file in files}
    if not checksums:
        return None
    named = [checksums[name] for name in UPLOAD_FILES]
    # Only optional files are tagged with their names, so that checksums from before optional files existed stay valid.
    named += [f"{name} {checksums[name]}" for name in FURTHER_FILES if name in checksums]
    return hashlib.sha256("".join(named).encode()).hexdigest()


def identical_version(
    connection: Connection, adapter_id: str, sha256: str, but: str = ""
) -> Row[*tuple[Any, ...]] | None:
    """Find an adapter's first version whose `files_sha256` is `sha256`, ignoring the version `but` and rejected
    versions.
    """
    columns = adapter_versions.c
    query = select(columns.id, columns.number, columns.upload_id).where(
        columns.adapter_id == adapter_id,
        columns.files_sha256 == sha256,
        columns.state != "rejected",
        columns.id != but,
    )
    # Sort in Python: to return the lowest number first, SQLite would scan all of the adapter's versions.
    return min(connection.execute(query), key=lambda row: row.number, default=None)


def upload_of(row: Row[*tuple[Any, ...]]) -> Upload:
    files = tuple(UploadFile(**file) for file in row.files)
    return Upload(row.id, row.adapter_id, files, row.state, row.created_us, row.expires_us, row.source_url)


def _lock_owner(connection: Connection, adapter_id: str) -> str:
    """Lock the row of an adapter's tenant and return the tenant's identifier."""
    tenant_id: str = connection.execute(select(owner_of(adapter_id))).scalar_one()
    lock_tenant(connection, tenant_id)
    return tenant_id


def _own_upload(connection: Connection, adapter_id: str, upload_id: str) -> Upload:
    row = None
    if is_identifier(upload_id):
        row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
    if row is None or row.adapter_id != adapter_id:
        raise UploadNotFound("the adapter has no such upload")
    return upload_of(row)


def _already_used() -> UploadRefused:
    return UploadRefused("upload_used", "the upload has already been used for a version")


def _check_open(upload: Upload, now_us: int) -> None:
    if upload.state != "open":
        raise _already_used()
    if upload.expires_us <= now_us:
        raise UploadRefused("upload_expired", "the upload has expired: create a new one")


def _existing_version(connection: Connection, upload: Upload) -> AddedVersion | None:
    sha256 = files_sha256(upload.files)
    if sha256 is None:
        return None
    columns = adapter_versions.c
    own = select(columns.id, columns.upload_id).where(
        columns.adapter_id == upload.adapter_id, columns.files_sha256 == sha256, columns.upload_id == upload.id
    )
    found = connection.execute(own).first() or identical_version(connection, upload.adapter_id, sha256)
    return None if found is None else AddedVersion(_version(connection, found.id), found.upload_id)


def _insert_version(
    connection: Connection,
    upload: Upload,
    now_us: int,
    base_id: str | None,
    claim: Mapping[str, Any] = MappingProxyType({}),
) -> AddedVersion:
    version_id = new_id("adv")
    connection.execute(
        insert(adapter_versions).values(
            id=version_id,
            adapter_id=upload.adapter_id,
            number=last_number(connection, upload.adapter_id) + 1,
            **{"state": "pending", **claim},
            upload_id=upload.id,
            files_sha256=files_sha256(upload.files),
            report={},
            created_us=now_us,
            base_id=base_id,
        )
    )
    added = AddedVersion(_version(connection, version_id), upload.id)
    target, after = f"{upload.adapter_id}@{added.version.number}", {"state": "pending", "upload_id": upload.id}
    audit(connection, now_us, "version.create", target, tenant_id=owner_of(upload.adapter_id), after=after)
    return added


def _version(connection: Connection, version_id: str) -> AdapterVersion:
    return version_of(connection.execute(select_versions().where(adapter_versions.c.id == version_id)).one())

"""The files of tenants: rows in the database, and contents in the blob store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import structlog
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, exists, func, insert, or_, select, update

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable
from loramux.adapter_store.registry.registry import is_identifier
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import batches, file_purges, files, tenants
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import DELETED
from loramux.platform.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unauthenticated, Unavailable

Purpose = Literal["batch", "batch_output"]

MAX_FILES = 10_000
"""Maximum number of a tenant's files."""
MAX_NAME = 255
"""Longest kept name of a file, in characters."""
UPLOAD_US = 6 * 3_600_000_000
"""Longest time for which a row can wait for its blob, in microseconds. Then the row is deleted."""
STORE_RETRY_S = 5.0

_PREFIX = "files/"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose files and batches a caller may see: its tenant's or, with a key limited to some adapters, the key's own."""

    tenant_id: str
    api_key_id: str
    is_limited: bool

    @staticmethod
    def of(caller: Principal) -> Owner:
        """Raises PermissionDenied if the key cannot run inference."""
        if caller.tenant_id is None or not caller.scopes & {"adapters", "base"}:
            raise PermissionDenied("files and batches need a tenant's key with the scope 'adapters' or 'base'")
        return Owner(caller.tenant_id, caller.key_id, caller.adapter_ids is not None)

    def sees(self, table: Any) -> Any:
        """The condition on a table with the columns `tenant_id` and `api_key_id`."""
        is_own = table.c.tenant_id == self.tenant_id
        return and_(is_own, table.c.api_key_id == self.api_key_id) if self.is_limited else is_own


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFile:
    id: str
    tenant_id: str
    api_key_id: str
    purpose: Purpose
    name: str
    num_bytes: int
    created_us: int
    expires_us: int | None

    @property
    def blob_key(self) -> str:
        return f"{_PREFIX}{self.tenant_id}/{self.id}"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a list shows: at most `limit` items after the identifier `after`, newest first unless `is_ascending`."""

    limit: int
    after: str | None = None
    is_ascending: bool = False


class TenantFiles:
    """Creates, lists, reads and deletes files. Blocking.

    A row exists before its blob and until its blob has been deleted, so that a crash leaves no blob behind. `clear_up`
    finishes what a crash has interrupted. `max_bytes` limits a file, and `max_total_bytes` all files of a tenant.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        scratch: Path,
        max_bytes: int = 200 << 20,
        max_total_bytes: int = 10 << 30,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self.scratch = scratch
        self.max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes

    def create(self, owner: Owner, name: str, source: Path, lifetime_us: int | None = None) -> TenantFile:
        """Keep an uploaded file.

        Raises InvalidRequest if the tenant has too many files, Unauthenticated if it has been deleted, or Unavailable.
        """
        num_bytes = source.stat().st_size
        with self._database.write() as connection:
            locked = select(tenants.c.id).where(tenants.c.id == owner.tenant_id).with_for_update()
            if connection.scalar(locked) is None:
                raise Unauthenticated(DELETED)
            now_us = self._database.now_us(connection)
            own = select(func.count(), func.coalesce(func.sum(files.c.num_bytes), 0))
            count, total = connection.execute(own.where(files.c.tenant_id == owner.tenant_id)).one()
            if count >= MAX_FILES or total + num_bytes > self._max_total_bytes:
                raise InvalidRequest(
                    f"the tenant's files must not exceed {self._max_total_bytes} bytes or {MAX_FILES} files: delete "
                    "some first",
                    code="file_storage_full",
                    param="file",
                )
            file = TenantFile(
                id=new_id("fil"),
                tenant_id=owner.tenant_id,
                api_key_id=owner.api_key_id,
                purpose="batch",
                name=name[:MAX_NAME],
                num_bytes=num_bytes,
                created_us=now_us,
                expires_us=None if lifetime_us is None else now_us + lifetime_us,
            )
            connection.execute(insert(files).values(_values(file, "uploading")))
        self.put_blob(file, source)
        with self._database.write() as connection:
            mark_ready(connection, file.id)
        return file

    def put_output(self, file: TenantFile, source: Path, lifetime_us: int | None = None) -> None:
        """Store the blob of a batch's file. `mark_ready` makes the file visible. Can be repeated after a crash.

        With `lifetime_us`, the file expires this many microseconds from now.
        """
        with self._database.write() as connection:
            if lifetime_us is not None:
                file = replace(file, expires_us=self._database.now_us(connection) + lifetime_us)
            connection.execute(delete(files).where(files.c.id == file.id, files.c.state != "ready"))
            connection.execute(insert(files).values(_values(file, "uploading")))
        # An earlier attempt may have stored other bytes.
        self._blobs.delete(file.blob_key)
        self.put_blob(file, source)

    def put_blob(self, file: TenantFile, source: Path) -> None:
        try:
            self._blobs.put(file.blob_key, source)
        except BlobStoreUnavailable as error:
            raise _unavailable(error) from error

    def get(self, owner: Owner, file_id: str) -> TenantFile:
        """Raises NotFound, also for another tenant's file."""
        row = None
        if is_identifier(file_id):
            with self._database.read() as connection:
                is_own = (files.c.id == file_id, owner.sees(files), *_is_ready(self._database.now_us(connection)))
                row = connection.execute(select(files).where(*is_own)).one_or_none()
        if row is None:
            raise _not_found()
        return _file(row)

    def list(self, owner: Owner, listing: Listing, purpose: str | None = None) -> tuple[Sequence[TenantFile], bool]:
        """Return one page of the files, and whether there are more."""
        query = select(files).where(owner.sees(files))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self._database.read() as connection:
            query = query.where(*_is_ready(self._database.now_us(connection)))
            rows = connection.execute(paged(query, files.c.id, listing)).all()
        return [_file(row) for row in rows[: listing.limit]], len(rows) > listing.limit

    def fetch(self, file: TenantFile, destination: Path) -> None:
        """Write a file's content to `destination`. Raises NotFound if it has just been deleted, or Unavailable."""
        try:
            self._blobs.get(file.blob_key, destination)
        except BlobNotFound:
            raise _not_found() from None
        except BlobStoreUnavailable as error:
            raise _unavailable(error) from error

    def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file. Raises NotFound, or Conflict while an unfinished batch needs the file."""
        file = self.get(owner, file_id)
        with self._database.write() as connection:
            lock_file(connection, file_id, self._database.now_us(connection))
            if connection.scalar(select(_is_needed(file_id))):
                raise Conflict("a batch that has not finished needs the file: cancel it first", code="file_in_use")
            is_ready = (files.c.id == file_id, files.c.state == "ready")
            if connection.execute(update(files).where(*is_ready).values(state="deleting")).rowcount == 0:
                raise _not_found()
        try:
            self._delete(file)
        except BlobStoreUnavailable as error:
            # The file is gone for its tenant. `clear_up` deletes the blob.
            log.warning("a file's content cannot be deleted yet", file_id=file_id, error=str(error))

    def clear_up(self) -> None:
        """Delete expired files, what crashes and purged tenants have left, and what could not be deleted before.

        Raises BlobStoreUnavailable.
        """
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            is_stale = and_(files.c.state == "uploading", files.c.created_us < now_us - UPLOAD_US)
            ends = or_(files.c.state == "deleting", is_stale, files.c.expires_us <= now_us)
            is_over = (ends, ~_is_needed(files.c.id))
            over = [_file(row) for row in connection.execute(select(files).where(*is_over).limit(1000))]
        for file in over:
            with self._database.write() as connection:
                # A batch may need the file by now. The lock comes first, so that the update sees this batch.
                connection.execute(select(files.c.id).where(files.c.id == file.id).with_for_update())
                change = update(files).where(files.c.id == file.id, *is_over).values(state="deleting")
                is_changed = connection.execute(change).rowcount == 1
            if is_changed:
                self._delete(file)
        with self._database.read() as connection:
            purged = connection.execute(select(file_purges)).all()
        # Only blobs of tenants that this database has purged: another database may use the same blob store.
        for row in purged:
            for key in list(self._blobs.list_keys(f"{_PREFIX}{row.tenant_id}/")):
                self._blobs.delete(key)
        if purged:
            # A server that was writing a blob during the purge has finished by then.
            with self._database.write() as connection:
                connection.execute(delete(file_purges).where(file_purges.c.purged_us < now_us - UPLOAD_US))

    def _delete(self, file: TenantFile) -> None:
        self._blobs.delete(file.blob_key)
        with self._database.write() as connection:
            connection.execute(delete(files).where(files.c.id == file.id, files.c.state == "deleting"))


def paged(query: Any, id_column: Any, listing: Listing) -> Any:
    """Select one row more than the page has. The identifier `after` need not exist."""
    if listing.after is not None:
        query = query.where(id_column > listing.after if listing.is_ascending else id_column < listing.after)
    return query.order_by(id_column.asc() if listing.is_ascending else id_column.desc()).limit(listing.limit + 1)


def mark_ready(connection: Connection, file_id: str) -> None:
    """Make a file visible. Raises NotFound if it has been deleted meanwhile."""
    change = update(files).where(files.c.id == file_id, files.c.state == "uploading").values(state="ready")
    if connection.execute(change).rowcount == 0:
        raise _not_found()


def lock_file(connection: Connection, file_id: str, now_us: int) -> bool:
    """Lock a ready file's row, so that the file is not deleted while a batch is created. Return False without one."""
    query = select(files.c.id).where(files.c.id == file_id, *_is_ready(now_us))
    return connection.scalar(query.with_for_update()) is not None


def _is_ready(now_us: int) -> Sequence[ColumnElement[bool]]:
    """The conditions for a file that its tenant can use. A file that a batch needs expires after the batch."""
    lives = or_(files.c.expires_us.is_(None), files.c.expires_us > now_us, _is_needed(files.c.id))
    return files.c.state == "ready", lives


def _is_needed(file_id: Any) -> ColumnElement[bool]:
    """Match the input of an unfinished batch, and its output and error files, which are being written."""
    columns = (batches.c.input_file_id, batches.c.output_file_id, batches.c.error_file_id)
    own = or_(*[column == file_id for column in columns])
    return exists().where(own, batches.c.finished_us.is_(None))


def _not_found() -> NotFound:
    return NotFound("there is no such file", code="file_not_found", param="file_id")


def _unavailable(error: BlobStoreUnavailable) -> Unavailable:
    log.warning("the blob store of files is unavailable", error=str(error))
    return Unavailable(
        "the store of files cannot be reached; try again",
        code="blob_store_unavailable",
        retry_after_s=error.retry_after_s or STORE_RETRY_S,
    )


def _values(file: TenantFile, state: str) -> dict[str, Any]:
    return {
        "id": file.id,
        "tenant_id": file.tenant_id,
        "api_key_id": file.api_key_id,
        "purpose": file.purpose,
        "name": file.name,
        "num_bytes": file.num_bytes,
        "state": state,
        "created_us": file.created_us,
        "expires_us": file.expires_us,
    }


def _file(row: Row[Any]) -> TenantFile:
    facts = dict(row._mapping)
    del facts["state"]
    return TenantFile(**facts)

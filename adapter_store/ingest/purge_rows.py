"""SQL that purges versions and adapters. The blobs are deleted afterwards: see `purged_blobs.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect, Select, delete, func, select

from loramux.adapter_store.errors import RequestsRunning, VersionInUse, VersionNotFound, WeightsBeingPurged
from loramux.adapter_store.registry.evals import delete_evals
from loramux.adapter_store.registry.registry import MAX_VERSION, delete_adapter_rows, lock_adapter, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.schema import (
    adapter_alias_targets,
    adapter_grants,
    adapter_version_files,
    adapter_versions,
    adapters,
    purges,
    quota_policies,
    reservations,
    retired_numbers,
    tenants,
    uploads,
    version_bases,
)
from loramux.migrations.upserts import upsert

AGAIN_US = 3_600_000_000
"""How long after a purge the blobs are deleted once more, in microseconds. A server that was validating the version or
rebuilding its packed file finishes well before.
"""
_MAX_IDS = 500
"""Maximum number of identifiers in one statement."""

_versions = adapter_versions.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """What a purge deletes, or would delete."""

    num_versions: int
    num_bytes: int
    """Bytes of the canonical and the optional files, except files that stay because another version shares them."""
    digests: tuple[str, ...]
    """Digests of weights that no other version has."""
    num_shared: int
    """Number of digests whose blobs stay, because versions of other adapters have the same weights."""
    num_running: int
    """Number of requests that are running on the versions."""
    aliases: tuple[str, ...]
    """Names of the aliases that point at the versions."""
    num_grants: int
    num_quotas: int
    num_uploads: int


class PurgeRows:
    """Deletes the rows of versions and adapters, and records what else has to be deleted. Blocking.

    Each purge is one transaction. It also writes the audit entry, and rows of `purges`, from which any server deletes
    the blobs and its own copies. Weights that another version has, of any tenant, stay.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def look(self, adapter_id: str, number: int | None = None) -> Purge:
        """Return what a purge would delete. Raises VersionNotFound."""
        with self._database.read() as connection:
            return _found(connection, adapter_id, _rows_of(connection, adapter_id, number), number is None)

    def purge_version(self, adapter_id: str, number: int) -> Purge:
        """Purge one version.

        Raises AdapterNotFound, VersionNotFound, VersionInUse if an alias names the version, or RequestsRunning.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            rows = _rows_of(connection, adapter_id, number, is_locking=True)
            found = _found(connection, adapter_id, rows, is_whole=False)
            if found.aliases:
                raise VersionInUse(f"the alias {found.aliases[0]!r} names version {number}: move it first")
            return self._delete(connection, adapter_id, rows, found, f"{adapter_id}@{number}")

    def purge_adapter(self, adapter_id: str) -> Purge:
        """Purge an adapter with its versions, aliases, grants, uploads and quotas.

        Raises AdapterNotFound or RequestsRunning.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            rows = _rows_of(connection, adapter_id, None, is_locking=True)
            return self._delete(connection, adapter_id, rows, _found(connection, adapter_id, rows, True), adapter_id)

    def _delete(
        self, connection: Connection, adapter_id: str, rows: Sequence[Row[Any]], found: Purge, target: str
    ) -> Purge:
        if found.num_running:
            raise RequestsRunning(found.num_running)
        is_whole = target == adapter_id
        now_us = self._database.now_us(connection)
        _retire_numbers(connection, adapter_id)
        _delete_versions(connection, rows)
        upload_ids = [row.upload_id for row in rows]
        if is_whole:
            upload_ids += connection.scalars(select(uploads.c.id).where(uploads.c.adapter_id == adapter_id)).all()
        # The janitor deletes the files of uploads without a row.
        _delete_where(connection, uploads.c.id, upload_ids)
        for digest in sorted({row.digest for row in rows} - {None}):
            lock_digest(connection, digest)
        digests = _unshared(connection, {row.digest for row in rows} - {None})
        _note(connection, "digest", digests, now_us)
        _note(connection, "version", [row.id for row in rows], now_us)
        before: dict[str, object] = {"versions": len(rows), "bytes": found.num_bytes}
        if is_whole:
            before["name"] = connection.execute(select(_model_of(adapter_id))).scalar_one()
        action = "adapter.purge" if is_whole else "version.purge"
        audit(connection, now_us, action, target, tenant_id=_owner(connection, adapter_id), before=before)
        if is_whole:
            delete_adapter_rows(connection, adapter_id)
        return found


def refuse_purged(connection: Connection, digest: str) -> None:
    """Raise WeightsBeingPurged while the blobs with this digest are being deleted.

    Otherwise, no purge of the digest begins before the caller's transaction ends. The caller must have locked its
    version's row, because purges lock the rows before the digests.
    """
    lock_digest(connection, digest)
    being_deleted = select(purges.c.id).where(purges.c.id == digest, purges.c.state == "deleting")
    if connection.execute(being_deleted).first() is not None:
        raise WeightsBeingPurged("equal weights are being purged; the version is validated again later")


def lock_digest(connection: Connection, digest: str) -> None:
    """Let transactions that add or remove references to a digest take turns.

    On SQLite, all transactions that write take turns anyway.
    """
    if connection.dialect.name == "postgresql":
        key = int.from_bytes(bytes.fromhex(digest[:16]), "big", signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def is_shared(connection: Connection, digest: str) -> bool:
    """Return whether any version has the digest."""
    return connection.execute(select(_versions.id).where(_versions.digest == digest).limit(1)).first() is not None


def last_number(connection: Connection, adapter_id: str) -> int:
    """Return the highest version number that the adapter's name has had so far, or 0."""
    last = select(func.max(_versions.number)).where(_versions.adapter_id == adapter_id)
    retired = select(retired_numbers.c.last_number).where(retired_numbers.c.model == _model_of(adapter_id))
    return max(connection.execute(last).scalar() or 0, connection.execute(retired).scalar() or 0)


def _model_of(adapter_id: str) -> ScalarSelect[str]:
    joined = select(tenants.c.slug + "/" + adapters.c.name).join_from(
        adapters, tenants, tenants.c.id == adapters.c.tenant_id
    )
    return joined.where(adapters.c.id == adapter_id).scalar_subquery()


def _rows_of(
    connection: Connection, adapter_id: str, number: int | None, is_locking: bool = False
) -> Sequence[Row[Any]]:
    """Return the adapter's versions, or the one with this number. Raises VersionNotFound."""
    query: Select[Any] = select(
        _versions.id, _versions.number, _versions.digest, _versions.canonical_bytes, _versions.upload_id
    ).where(_versions.adapter_id == adapter_id)
    if number is not None:
        query = query.where(_versions.number == (number if 0 < number <= MAX_VERSION else 0))
    if is_locking:
        # Locked versions get no new references from other tables, and no verdict.
        query = query.order_by(_versions.id).with_for_update()
    rows = connection.execute(query).all()
    if number is not None and not rows:
        raise VersionNotFound("the adapter has no such version")
    return rows


def _found(connection: Connection, adapter_id: str, rows: Sequence[Row[Any]], is_whole: bool) -> Purge:
    ids = [row.id for row in rows]
    sizes = {row.digest: row.canonical_bytes or 0 for row in rows if row.digest is not None}
    own = _unshared(connection, set(sizes), but=ids)
    files = adapter_version_files.c
    targets = adapter_alias_targets.c
    named: set[str] = set()
    num_bytes, num_running = sum(sizes[digest] for digest in own), 0
    for part in _parts(ids):
        total = select(func.coalesce(func.sum(files.size), 0)).where(files.version_id.in_(part))
        num_bytes += int(connection.execute(total).scalar_one())
        named.update(connection.scalars(select(targets.name).where(targets.version_id.in_(part))))
        is_running = reservations.c.adapter_version_id.in_(part) & (reservations.c.state == "open")
        num_running += _count(connection, is_running)
    return Purge(
        num_versions=len(rows),
        num_bytes=num_bytes,
        digests=tuple(sorted(own)),
        num_shared=len(sizes) - len(own),
        num_running=num_running,
        aliases=tuple(sorted(named)),
        num_grants=_count(connection, adapter_grants.c.adapter_id == adapter_id) if is_whole else 0,
        num_quotas=_count(connection, quota_policies.c.subject_id == adapter_id) if is_whole else 0,
        num_uploads=_count(connection, (uploads.c.adapter_id == adapter_id) & (uploads.c.state == "open"))
        if is_whole
        else 0,
    )


def _count(connection: Connection, condition: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).where(condition)).scalar_one())


def _unshared(connection: Connection, digests: Collection[str], but: Collection[str] = ()) -> list[str]:
    """Return the digests that no version has, except the versions in `but`."""
    ignored = set(but)
    shared: set[str] = set()
    for part in _parts(sorted(digests)):
        rows = connection.execute(select(_versions.id, _versions.digest).where(_versions.digest.in_(part)))
        shared.update(row.digest for row in rows if row.id not in ignored)
    return sorted(set(digests) - shared)


def _delete_versions(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    ids = [row.id for row in rows]
    for part in _parts(ids):
        delete_evals(connection, part)
    for column in (
        adapter_alias_targets.c.version_id,
        version_bases.c.version_id,
        adapter_version_files.c.version_id,
        adapter_versions.c.id,
    ):
        _delete_where(connection, column, ids)


def _delete_where(connection: Connection, column: Any, ids: Sequence[str]) -> None:
    for part in _parts(ids):
        connection.execute(delete(column.table).where(column.in_(part)))


def _retire_numbers(connection: Connection, adapter_id: str) -> None:
    last = last_number(connection, adapter_id)
    if last == 0:
        return
    model = connection.execute(select(_model_of(adapter_id))).scalar_one()
    added = upsert(connection, retired_numbers).values(model=model, last_number=last)
    connection.execute(added.on_conflict_do_update(index_elements=["model"], set_={"last_number": last}))


def _note(connection: Connection, kind: str, ids: Sequence[str], now_us: int) -> None:
    """Record that the blobs of these digests or versions must be deleted."""
    change = {"state": "deleting", "purged_us": now_us, "due_us": now_us + AGAIN_US}
    for one in ids:
        added = upsert(connection, purges).values(id=one, kind=kind, **change)
        connection.execute(added.on_conflict_do_update(index_elements=["id"], set_=change))


def _owner(connection: Connection, adapter_id: str) -> str:
    return str(connection.execute(select(owner_of(adapter_id))).scalar_one())


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + _MAX_IDS] for start in range(0, len(ids), _MAX_IDS)]

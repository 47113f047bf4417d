"""The SQL of uploads and of versions on their way to ready or rejected."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from loramux.adapter_store.aliases import DEFAULT_WEIGHT, SYSTEM, change_alias
from loramux.adapter_store.errors import UploadNotFound, UploadRefused, VersionNotFound
from loramux.adapter_store.records import DEFAULT_ALIAS, AdapterVersion, AliasTarget, Upload, UploadFile
from loramux.adapter_store.registry import is_identifier, lock_adapter, select_versions, version_of
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_aliases, adapter_versions, uploads


@dataclass(frozen=True, slots=True)
class AddedVersion:
    """A version, and the upload that it was made of."""

    version: AdapterVersion
    upload_id: str


class Intake:
    """Every change of an upload's or a version's state is one transaction here.

    A version goes pending -> validating -> ready or rejected; recovery and a store that is down lead it back to
    pending. Only one worker gets a version from pending to validating.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def open_upload(self, adapter_id: str, files: Sequence[UploadFile], lifetime_us: int) -> Upload:
        """Raises AdapterNotFound."""
        upload_id = new_id("upl")
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            now_us = self._database.now_us(connection)
            connection.execute(
                insert(uploads).values(
                    id=upload_id,
                    adapter_id=adapter_id,
                    files=[asdict(file) for file in files],
                    state="open",
                    created_us=now_us,
                    expires_us=now_us + lifetime_us,
                )
            )
        return Upload(upload_id, adapter_id, tuple(files), "open", now_us, now_us + lifetime_us)

    def get_upload(self, upload_id: str) -> Upload | None:
        if not is_identifier(upload_id):
            return None
        with self._database.read() as connection:
            row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
        return _upload(row) if row else None

    def require_open(self, upload_id: str) -> Upload:
        """Raises UploadNotFound, or UploadRefused for one that is used or expired."""
        upload = self.get_upload(upload_id)
        if upload is None:
            raise UploadNotFound(f"no upload {upload_id!r}")
        self.check_open(upload)
        return upload

    def check_open(self, upload: Upload) -> None:
        """Raises UploadRefused for an upload that is used or expired."""
        _check_open(upload, self._database.now_us())

    def add_version(self, adapter_id: str, upload_id: str) -> AddedVersion:
        """Use an upload for a new pending version.

        The upload may have been used already, or its files may be those of another version that was not refused;
        that version is then returned. Raises AdapterNotFound, UploadNotFound, or UploadRefused for an expired upload.
        """
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            row = None
            if is_identifier(upload_id):
                row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
            if row is None or row.adapter_id != adapter_id:
                raise UploadNotFound(f"the adapter has no upload {upload_id!r}")
            upload = _upload(row)
            added = _existing_version(connection, upload)
            if added is None:
                now_us = self._database.now_us(connection)
                _check_open(upload, now_us)
                added = _insert_version(connection, upload, now_us)
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(state="used"))
        return added

    def get_version(self, version_id: str) -> AdapterVersion:
        """Raises VersionNotFound."""
        row = None
        if is_identifier(version_id):
            with self._database.read() as connection:
                row = connection.execute(select_versions().where(adapter_versions.c.id == version_id)).first()
        if row is None:
            raise VersionNotFound(f"no version {version_id!r}")
        return version_of(row)

    def pending_versions(self) -> list[str]:
        """Identifiers of the versions that wait for validation, oldest first."""
        query = select(adapter_versions.c.id).where(adapter_versions.c.state == "pending")
        with self._database.read() as connection:
            return [row.id for row in connection.execute(query.order_by(adapter_versions.c.id))]

    def claim(self, version_id: str) -> Upload | None:
        """Take a pending version for validation and return its upload; None where it is not pending."""
        with self._database.write() as connection:
            if not _change_state(connection, version_id, "pending", {"state": "validating"}):
                return None
            row = connection.execute(
                select(uploads)
                .join(adapter_versions, adapter_versions.c.upload_id == uploads.c.id)
                .where(adapter_versions.c.id == version_id)
            ).one()
        return _upload(row)

    def give_back(self, version_id: str) -> None:
        """Let a version wait again: its validation could not be finished."""
        with self._database.write() as connection:
            _change_state(connection, version_id, "validating", {"state": "pending"})

    def give_back_older(self, age_us: int) -> None:
        """Let every version wait again that was made so long ago and is still in validation."""
        with self._database.write() as connection:
            made_us = self._database.now_us(connection) - age_us
            connection.execute(
                update(adapter_versions)
                .where(adapter_versions.c.state == "validating", adapter_versions.c.created_us < made_us)
                .values(state="pending")
            )

    def publish(
        self,
        version: AdapterVersion,
        digest: str,
        max_rank: int,
        num_pages: int,
        canonical_bytes: int,
        report: Mapping[str, Any],
    ) -> bool:
        """Make a version ready, and the default one where the adapter has none; False where none was validating it."""
        with self._database.write() as connection:
            lock_adapter(connection, version.adapter_id)
            now_us = self._database.now_us(connection)
            facts = {
                "state": "ready",
                "digest": digest,
                "max_rank": max_rank,
                "num_pages": num_pages,
                "canonical_bytes": canonical_bytes,
                "report": dict(report),
                "ready_us": now_us,
            }
            if not _change_state(connection, version.id, "validating", facts):
                return False
            aliases = adapter_aliases.c
            default = select(aliases.name).where(
                aliases.adapter_id == version.adapter_id, aliases.name == DEFAULT_ALIAS
            )
            if connection.execute(default).first() is None:
                first = [AliasTarget(version.id, version.number, DEFAULT_WEIGHT)]
                change_alias(connection, version.adapter_id, DEFAULT_ALIAS, first, SYSTEM, "set", now_us)
        return True

    def reject(self, version_id: str, report: Mapping[str, Any]) -> bool:
        """False where the version was not being validated."""
        with self._database.write() as connection:
            return _change_state(connection, version_id, "validating", {"state": "rejected", "report": dict(report)})

    def uploads_in_use(self, upload_ids: Collection[str]) -> set[str]:
        """Those of the uploads whose files are still wanted: open and not expired, or of an unfinished version."""
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            is_open = select(uploads.c.id).where(uploads.c.state == "open", uploads.c.expires_us > now_us)
            is_unfinished = select(adapter_versions.c.upload_id).where(
                adapter_versions.c.state.in_(("pending", "validating"))
            )
            wanted = {row[0] for query in (is_open, is_unfinished) for row in connection.execute(query)}
        return wanted & set(upload_ids)


def _check_open(upload: Upload, now_us: int) -> None:
    if upload.state != "open":
        raise UploadRefused("upload_used", "the upload has been used for a version")
    if upload.expires_us <= now_us:
        raise UploadRefused("upload_expired", "the upload has expired: make a new one")


def _existing_version(connection: Connection, upload: Upload) -> AddedVersion | None:
    query = (
        select(adapter_versions.c.id, adapter_versions.c.state, adapter_versions.c.upload_id, uploads.c.files)
        .join(uploads, uploads.c.id == adapter_versions.c.upload_id)
        .where(adapter_versions.c.adapter_id == upload.adapter_id)
        .order_by(adapter_versions.c.number)
    )
    rows = connection.execute(query).all()
    checksums = {file.name: file.sha256 for file in upload.files}
    own = [row for row in rows if row.upload_id == upload.id]
    identical = [
        row
        for row in rows
        if row.state != "rejected" and {file["name"]: file["sha256"] for file in row.files} == checksums
    ]
    for row in own + identical:
        return AddedVersion(_version(connection, row.id), row.upload_id)
    return None


def _insert_version(connection: Connection, upload: Upload, now_us: int) -> AddedVersion:
    version_id = new_id("adv")
    last = select(func.max(adapter_versions.c.number)).where(adapter_versions.c.adapter_id == upload.adapter_id)
    connection.execute(
        insert(adapter_versions).values(
            id=version_id,
            adapter_id=upload.adapter_id,
            number=(connection.execute(last).scalar() or 0) + 1,
            state="pending",
            upload_id=upload.id,
            report={},
            created_us=now_us,
        )
    )
    return AddedVersion(_version(connection, version_id), upload.id)


def _version(connection: Connection, version_id: str) -> AdapterVersion:
    return version_of(connection.execute(select_versions().where(adapter_versions.c.id == version_id)).one())


def _change_state(connection: Connection, version_id: str, wanted: str, values: Mapping[str, Any]) -> bool:
    changed = connection.execute(
        update(adapter_versions)
        .where(adapter_versions.c.id == version_id, adapter_versions.c.state == wanted)
        .values(values)
    )
    return changed.rowcount == 1


def _upload(row: Row[*tuple[Any, ...]]) -> Upload:
    files = tuple(UploadFile(**file) for file in row.files)
    return Upload(row.id, row.adapter_id, files, row.state, row.created_us, row.expires_us)

"""SQL for versions in validation. Only one server at a time can claim a version and record its verdict."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import structlog
from sqlalchemy import Connection, select, update

from loramux.adapter_store.errors import AdapterRejected, ClaimLost
from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.formats.version_files.further_files import NO_FURTHER_FILES, FurtherFiles, version_digest
from loramux.adapter_store.ingest.purge_rows import refuse_purged
from loramux.adapter_store.ingest.upload_rows import (
    files_sha256,
    identical_version,
    is_for_base,
    upload_of,
)
from loramux.adapter_store.registry.aliases import DEFAULT_WEIGHT, SYSTEM, change_alias
from loramux.adapter_store.registry.bases import forget_verdicts, note_validated
from loramux.adapter_store.registry.records import (
    DEFAULT_ALIAS,
    UNFINISHED,
    AdapterVersion,
    AliasTarget,
    Upload,
    UploadFile,
)
from loramux.adapter_store.registry.registry import StockLimits, lock_adapter, select_versions, version_of
from loramux.adapter_store.registry.version_files import delete_further_files, replace_further_files
from loramux.migrations.claims import LEASE_US, NO_CLAIM, RowClaims
from loramux.migrations.database import Database
from loramux.migrations.events import EventType, note_event
from loramux.migrations.schema import adapter_aliases, adapter_versions, adapters, uploads

LEASE_S = LEASE_US / 1_000_000
IDENTICAL_TO = "identical_to"
"""Key of a rejected version's report: the number of the earlier version with the same bytes."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimedVersion:
    version: AdapterVersion
    upload: Upload


@dataclass(frozen=True, slots=True)
class Verdict:
    digest: str
    max_rank: int
    num_pages: int
    canonical_bytes: int
    report: Mapping[str, Any]
    files: FurtherFiles = NO_FURTHER_FILES
    invocation_tokens: Sequence[int] = ()
    """The tokens that activate the adapter, or () if it is always active."""
    task: AdapterTask | None = None
    """What the adapter is for, or None for generation."""


class VersionClaims:
    """One server's claims. Each state change is one transaction, and only the server that holds the claim makes it.

    pending -> validating (claimed) -> ready or rejected. Any server can claim a version that was returned to the queue
    or whose claim has expired. `accept` records the digest while the version is still `validating`, before any
    permanent blob is stored, so that every permanent blob has a row. An accepted version is valid for
    `base_id`, the base of this server.
    """

    def __init__(
        self,
        database: Database,
        lease_s: float = LEASE_S,
        limits: StockLimits | None = None,
        base_id: str | None = None,
    ) -> None:
        self._database = database
        self._limits = limits
        self._base_id = base_id
        self._rows = RowClaims(database, adapter_versions, UNFINISHED, round(lease_s * 1_000_000))
        self.server_id, self.lease_s = self._rows.server_id, self._rows.lease_s

    def claim_version(self, version_id: str) -> ClaimedVersion | None:
        """Claim a version. Return None if it has a verdict, is postponed, is already claimed, or is still left to
        servers of another base.
        """
        columns = adapter_versions.c
        with self._database.write() as connection:
            is_ours = is_for_base(self._base_id, self._database.now_us(connection))
            if not self._rows.claim(connection, version_id, {"state": "validating"}, is_ours):
                return None
            version = version_of(connection.execute(select_versions().where(columns.id == version_id)).one())
            query = select(uploads).join(adapter_versions, columns.upload_id == uploads.c.id)
            upload = upload_of(connection.execute(query.where(columns.id == version_id)).one())
        return ClaimedVersion(version, upload)

    def renew(self, version_id: str) -> None:
        """Extend the claim to one lease from now. Raises ClaimLost."""
        with self._database.write() as connection:
            self._change(connection, version_id, {})

    def give_back(self, version_id: str, delay_s: float = 0.0) -> None:
        """Return a version to the queue. No server can claim it for `delay_s` seconds. Raises ClaimLost."""
        with self._database.write() as connection:
            due_us = None
            if delay_s > 0:
                due_us = self._database.now_us(connection) + round(delay_s * 1_000_000)
            self._change(connection, version_id, {"state": "pending", "claimed_by": None, "claim_expires_us": due_us})

    def announce(self, claimed: ClaimedVersion, num_bytes: Mapping[str, int]) -> None:
        """Record the sizes of a source's files before copying them. The sizes count against the quota immediately.

        Raises ClaimLost, or AdapterRejected if the sizes exceed the tenant's quota.
        """
        adapter_id = claimed.version.adapter_id
        change = update(uploads).where(uploads.c.id == claimed.upload.id)
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            self._change(connection, claimed.version.id, {})
            # Do not count what an earlier attempt has announced.
            connection.execute(change.values(files=[]))
            if self._limits is not None:
                owner = connection.execute(select(adapters.c.tenant_id).where(adapters.c.id == adapter_id)).scalar_one()
                try:
                    total, now_us = sum(num_bytes.values()), self._database.now_us(connection)
                    self._limits.admit(connection, owner, "adapter_bytes", total, now_us)
                except self._limits.refusal as refusal:
                    raise AdapterRejected("insufficient_quota", str(refusal), "source") from None
            announced = [asdict(UploadFile(name, size, sha256="")) for name, size in num_bytes.items()]
            connection.execute(change.values(files=announced))

    def record_files(self, claimed: ClaimedVersion, files: Sequence[UploadFile]) -> None:
        """Record the files copied from a source.

        Raises ClaimLost, or AdapterRejected if another version of the adapter has the same bytes and was not rejected.
        """
        sha256 = files_sha256(files)
        assert sha256 is not None
        version = claimed.version
        with self._database.write() as connection:
            lock_adapter(connection, version.adapter_id)
            found = identical_version(connection, version.adapter_id, sha256, but=version.id)
            if found is not None:
                message, report = f"version {found.number} has the same bytes", {IDENTICAL_TO: found.number}
                raise AdapterRejected("identical_version", message, "source", report)
            self._change(connection, version.id, {"files_sha256": sha256})
            declared = [asdict(file) for file in files]
            connection.execute(update(uploads).where(uploads.c.id == claimed.upload.id).values(files=declared))

    def accept(self, version: AdapterVersion, verdict: Verdict) -> None:
        """Record that a version has passed validation, and store its optional files.

        Raises ClaimLost, WeightsBeingPurged, or AdapterRejected if another version with these weights is quarantined.
        """
        checksums = verdict.files.checksums
        facts = {
            "digest": verdict.digest,
            "version_digest": version_digest(verdict.digest, checksums) if checksums else None,
            "max_rank": verdict.max_rank,
            "num_pages": verdict.num_pages,
            "invocation_tokens": list(verdict.invocation_tokens) or None,
            "task": None if verdict.task is None else verdict.task.document(),
            "canonical_bytes": verdict.canonical_bytes,
            "report": dict(verdict.report),
        }
        with self._database.write() as connection:
            _refuse_quarantined(connection, version.adapter_id, verdict.digest)
            self._change(connection, version.id, facts)
            refuse_purged(connection, verdict.digest)
            # An earlier attempt may have recorded other files from the same source.
            replace_further_files(connection, version.id, verdict.files)
            # Record the verdict for this base here, not in `publish`: if this server dies, a server of another base may
            # publish the version.
            forget_verdicts(connection, version.id)
            if self._base_id is not None:
                note_validated(connection, version.id, self._base_id, self._database.now_us(connection))

    def publish(self, version: AdapterVersion) -> None:
        """Make an accepted version ready, and make it the default if the adapter has no default version.

        Raises ClaimLost, or AdapterRejected if a version with the same weights was quarantined after `accept`.
        """
        with self._database.write() as connection:
            lock_adapter(connection, version.adapter_id)
            now_us = self._database.now_us(connection)
            self._change(connection, version.id, {"state": "ready", "ready_us": now_us, **NO_CLAIM})
            digest = select(adapter_versions.c.digest).where(adapter_versions.c.id == version.id)
            _refuse_quarantined(connection, version.adapter_id, connection.execute(digest).scalar_one())
            self._note_event(connection, version.id, "version.ready")
            aliases = adapter_aliases.c
            default = select(aliases.name).where(
                aliases.adapter_id == version.adapter_id, aliases.name == DEFAULT_ALIAS
            )
            if connection.execute(default).first() is None:
                first = [AliasTarget(version.id, version.number, DEFAULT_WEIGHT)]
                change_alias(connection, version.adapter_id, DEFAULT_ALIAS, first, SYSTEM, "set", now_us)

    def reject(self, version_id: str, report: Mapping[str, Any]) -> None:
        """Reject a version permanently. Raises ClaimLost."""
        unset = ("digest", "version_digest", "max_rank", "num_pages", "invocation_tokens", "task", "canonical_bytes")
        nothing = dict.fromkeys(unset)
        with self._database.write() as connection:
            self._change(connection, version_id, {"state": "rejected", "report": dict(report), **nothing, **NO_CLAIM})
            self._note_event(connection, version_id, "version.rejected", error=report.get("error"))
            delete_further_files(connection, version_id)
            forget_verdicts(connection, version_id)

    def _note_event(self, connection: Connection, version_id: str, kind: EventType, **others: object) -> None:
        columns = adapter_versions.c
        query = select(columns.adapter_id, columns.number, columns.digest, adapters.c.tenant_id).join(adapters)
        row = connection.execute(query.where(columns.id == version_id)).one()
        data = {"version_id": version_id, "version": row.number, "digest": row.digest, **others}
        now_us = self._database.now_us(connection)
        note_event(connection, now_us, kind, data, tenant_id=row.tenant_id, adapter_id=row.adapter_id)

    def _change(self, connection: Connection, version_id: str, values: Mapping[str, Any]) -> None:
        if not self._rows.change(connection, version_id, values):
            raise ClaimLost("another server has taken over the version")


class Renewable(Protocol):
    @property
    def lease_s(self) -> float: ...

    def renew(self, version_id: str) -> None: ...


class ClaimRenewal:
    """Renews a claim three times per lease, on a thread that runs while the `with` block does.

    If the claim is lost anyway, the next change to the version raises ClaimLost.
    """

    def __init__(self, claims: Renewable, version_id: str) -> None:
        self._claims = claims
        self._version_id = version_id
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._claims.lease_s / 3):
            try:
                self._claims.renew(self._version_id)
            except ClaimLost:
                return
            except Exception as error:
                _log.warning("claim_not_renewed", version_id=self._version_id, error=str(error))


def _refuse_quarantined(connection: Connection, adapter_id: str, digest: str) -> None:
    """Raise AdapterRejected if the tenant has a quarantined version with these weights, under any adapter name."""
    own, other = adapters.alias(), adapters.alias()
    query = (
        select(adapter_versions.c.number, other.c.name)
        .join(other, other.c.id == adapter_versions.c.adapter_id)
        .join(own, own.c.tenant_id == other.c.tenant_id)
        .where(own.c.id == adapter_id, adapter_versions.c.digest == digest, adapter_versions.c.state == "quarantined")
        .limit(1)
    )
    found = connection.execute(query).first()
    if found is not None:
        raise AdapterRejected(
            "quarantined",
            f"version {found.number} of the adapter {found.name!r} has the same weights and is quarantined",
        )

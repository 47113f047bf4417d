"""Deletes the blobs of purged versions, and tells servers which copies of weights to delete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, exists, func, select, update

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key
from loramux.adapter_store.ingest.purge_rows import is_shared, lock_digest
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, purges

KEPT_US = 30 * 86_400_000_000
"""How long a purge is remembered, in microseconds, so that a server that was stopped still deletes its copies."""

_purges = purges.c


class PurgedBlobs:
    """Deletes the blobs of each purge, and again when `due_us` has passed. Any number of servers may run it. Blocking.

    A row stays in the state `deleting` until its blobs are gone, even if a server or the store fails in between.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        # On SQLite, no transaction is open during the deletion, because it would block every other writer. Only one
        # process deletes blobs there.
        self._deleting = threading.Lock()

    def clear_up(self) -> None:
        """Delete all blobs that are due, and forget old purges. Raises BlobStoreUnavailable."""
        self._begin_again()
        for row in self._rows(select(purges).where(_purges.state == "deleting")):
            with self._claimed(row.id) as is_own:
                if is_own:
                    self._delete_blobs(row)
        with self._database.write() as connection:
            old_us = self._database.now_us(connection) - KEPT_US
            is_over = (_purges.state == "deleted") & _purges.due_us.is_(None) & (_purges.purged_us < old_us)
            connection.execute(delete(purges).where(is_over))

    def num_deleting(self) -> int:
        """Return the number of digests and versions whose blobs have not been deleted yet."""
        with self._database.read() as connection:
            query = select(func.count()).where(_purges.state == "deleting")
            return int(connection.execute(query).scalar_one())

    def digests(self) -> frozenset[str]:
        """Return the digests of purged weights that no version has."""
        is_used = exists().where(adapter_versions.c.digest == _purges.id)
        return frozenset(row.id for row in self._rows(select(_purges.id).where(_purges.kind == "digest", ~is_used)))

    def _rows(self, query: Select[Any]) -> list[Row[Any]]:
        with self._database.read() as connection:
            return list(connection.execute(query))

    def _begin_again(self) -> None:
        """Mark the purges that are due for their second deletion, except weights that a version has by now."""
        with self._database.write() as connection:
            is_due = (_purges.state == "deleted") & (_purges.due_us <= self._database.now_us(connection))
            # Transactions that lock several digests lock them in order.
            query = select(_purges.id, _purges.kind).where(is_due).order_by(_purges.id)
            for row in connection.execute(query).all():
                if row.kind == "digest":
                    # Before the row, as in `PurgeRows`, so that a purge of the same weights cannot cause a deadlock.
                    lock_digest(connection, row.id)
                still_due = select(_purges.id).where(_purges.id == row.id, is_due).with_for_update(skip_locked=True)
                if connection.execute(still_due).first() is None:
                    continue
                is_used = row.kind == "digest" and is_shared(connection, row.id)
                state = "deleted" if is_used else "deleting"
                connection.execute(update(purges).where(_purges.id == row.id).values(state=state, due_us=None))

    @contextmanager
    def _claimed(self, purge_id: str) -> Iterator[bool]:
        """Let only this thread delete a purge's blobs, and mark them as deleted at the end."""
        if self._database.is_sqlite:
            with self._deleting:
                with self._database.read() as connection:
                    is_own = _is_deleting(connection, purge_id)
                yield is_own
                if is_own:
                    with self._database.write() as connection:
                        _mark_deleted(connection, purge_id)
            return
        with self._database.write() as connection:
            is_own = _is_deleting(connection, purge_id)
            yield is_own
            if is_own:
                _mark_deleted(connection, purge_id)

    def _delete_blobs(self, row: Row[Any]) -> None:
        if row.kind == "digest":
            # The packed files can be rebuilt from the canonical file, so that file goes first.
            self._blobs.delete(canonical_key(row.id))
        prefix = f"packed/{row.id}/" if row.kind == "digest" else f"originals/{row.id}/"
        for key in list(self._blobs.list_keys(prefix)):
            self._blobs.delete(key)


def _is_deleting(connection: Connection, purge_id: str) -> bool:
    query = select(_purges.id).where(_purges.id == purge_id, _purges.state == "deleting")
    return connection.execute(query.with_for_update(skip_locked=True)).first() is not None


def _mark_deleted(connection: Connection, purge_id: str) -> None:
    connection.execute(update(purges).where(_purges.id == purge_id).values(state="deleted"))

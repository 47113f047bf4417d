"""Batches: created, listed and cancelled by their tenants. `BatchClaims` runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, insert, select, update

from loramux.adapter_store.registry.registry import is_identifier
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import batches, tenants
from loramux.platform.accounts.tenants import DELETED
from loramux.platform.batches.tenant_files import Listing, Owner, TenantFiles, lock_file, paged
from loramux.platform.errors import Conflict, InvalidRequest, NotFound, RateLimited, Unauthenticated

BatchState = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
]

UNFINISHED: tuple[BatchState, ...] = ("validating", "in_progress", "finalizing", "cancelling")

WINDOW_US = 24 * 3_600_000_000
"""How long the requests of a batch can wait, in microseconds. It is the only window that OpenAI's API has."""
MAX_OPEN_BATCHES = 50
"""Maximum number of a tenant's unfinished batches."""
RETRY_S = 60.0
OUTPUT_LIFETIME = "loramux.output_lifetime_us"
"""Key in the column `labels` under which the lifetime of a batch's output files is stored. Clients cannot use it."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    endpoint: str
    input_file_id: str
    labels: Mapping[str, str]
    """OpenAI's `metadata`."""
    output_lifetime_us: int | None = None
    """How long the output and error files are kept, in microseconds. None means until they are deleted."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch failed. `line` is the line of the input file, or None."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    id: str
    tenant_id: str
    api_key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    labels: Mapping[str, str]
    output_lifetime_us: int | None
    state: BatchState
    errors: Sequence[BatchError]
    num_lines: int
    num_completed: int
    num_failed: int
    created_us: int
    expires_us: int
    in_progress_us: int | None
    finalizing_us: int | None
    cancelling_us: int | None
    finished_us: int | None

    @property
    def is_finished(self) -> bool:
        return self.finished_us is not None


class Batches:
    """Creates, lists and cancels batches. Blocking. Another tenant's batch is not found."""

    def __init__(self, database: Database, files: TenantFiles) -> None:
        self._database = database
        self._files = files

    def create(self, owner: Owner, new: NewBatch) -> Batch:
        """Queue a batch. Raises NotFound or InvalidRequest for its file or labels, RateLimited, or Unauthenticated."""
        labels = dict(new.labels)
        if OUTPUT_LIFETIME in labels:
            raise InvalidRequest(f"metadata cannot have the key {OUTPUT_LIFETIME}", param="metadata")
        if new.output_lifetime_us is not None:
            labels[OUTPUT_LIFETIME] = str(new.output_lifetime_us)
        file = self._files.get(owner, new.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest("the file's purpose must be 'batch'", param="input_file_id")
        with self._database.write() as connection:
            # The lock lets concurrent calls see each other's batches.
            locked = select(tenants.c.id).where(tenants.c.id == owner.tenant_id).with_for_update()
            if connection.scalar(locked) is None:
                raise Unauthenticated(DELETED)
            if not lock_file(connection, file.id, self._database.now_us(connection)):
                raise NotFound("there is no such file", code="file_not_found", param="file_id")
            is_open = (batches.c.tenant_id == owner.tenant_id, batches.c.state.in_(UNFINISHED))
            if connection.scalar(select(func.count()).select_from(batches).where(*is_open)) == MAX_OPEN_BATCHES:
                message = f"{MAX_OPEN_BATCHES} batches of this tenant are already waiting or running"
                raise RateLimited(message, code="too_many_batches", retry_after_s=RETRY_S)
            batch_id, now_us = new_id("bat"), self._database.now_us(connection)
            connection.execute(
                insert(batches).values(
                    id=batch_id,
                    tenant_id=owner.tenant_id,
                    api_key_id=owner.api_key_id,
                    endpoint=new.endpoint,
                    input_file_id=file.id,
                    labels=labels,
                    state="validating",
                    errors=[],
                    num_lines=0,
                    num_completed=0,
                    num_failed=0,
                    created_us=now_us,
                    expires_us=now_us + WINDOW_US,
                )
            )
            return read_batch(connection, batch_id)

    def get(self, owner: Owner, batch_id: str) -> Batch:
        """Raises NotFound."""
        with self._database.read() as connection:
            return _visible(connection, owner, batch_id)

    def list(self, owner: Owner, listing: Listing) -> tuple[Sequence[Batch], bool]:
        """Return one page of the batches, and whether there are more."""
        with self._database.read() as connection:
            rows = connection.execute(paged(select(batches).where(owner.sees(batches)), batches.c.id, listing)).all()
        return [batch_of(row) for row in rows[: listing.limit]], len(rows) > listing.limit

    def cancel(self, owner: Owner, batch_id: str) -> Batch:
        """Cancel a batch. Requests that are running finish. Raises NotFound, or Conflict if the batch has finished."""
        with self._database.write() as connection:
            found = _visible(connection, owner, batch_id)
            return cancel_open(connection, found.id, self._database.now_us(connection))[0]


def cancel_open(connection: Connection, batch_id: str, now_us: int) -> tuple[Batch, bool]:
    """Cancel a batch, and return it and whether it changed. Raises Conflict if the batch has finished or is deleted."""
    is_open = (batches.c.id == batch_id, batches.c.state.in_(("validating", "in_progress")))
    change = update(batches).where(*is_open).values(state="cancelling", cancelling_us=now_us)
    is_changed = connection.execute(change).rowcount == 1
    row = connection.execute(select(batches).where(batches.c.id == batch_id)).one_or_none()
    if row is None or row.state != "cancelling":
        state = "deleted" if row is None else row.state
        raise Conflict(f"the batch is {state}: it can no longer be cancelled", code="batch_not_open")
    return batch_of(row), is_changed


def read_batch(connection: Connection, batch_id: str) -> Batch:
    return batch_of(connection.execute(select(batches).where(batches.c.id == batch_id)).one())


def _visible(connection: Connection, owner: Owner, batch_id: str) -> Batch:
    row = None
    if is_identifier(batch_id):
        row = connection.execute(select(batches).where(batches.c.id == batch_id, owner.sees(batches))).one_or_none()
    if row is None:
        raise NotFound("there is no such batch", code="batch_not_found", param="batch_id")
    return batch_of(row)


def batch_of(row: Row[Any]) -> Batch:
    facts = dict(row._mapping)
    del facts["claimed_by"], facts["claim_expires_us"]
    labels = dict(facts["labels"])
    lifetime_us = labels.pop(OUTPUT_LIFETIME, None)
    facts |= {"labels": labels, "output_lifetime_us": None if lifetime_us is None else int(lifetime_us)}
    return Batch(**{**facts, "errors": [BatchError(**one) for one in facts["errors"]]})

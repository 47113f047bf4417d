"""Stores chat completions in the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.paging import Page
from loramux.platform.stored_responses.response_store import DAY_US, admit_bytes, hold_tenant
from loramux.platform.stored_responses.sealing import ContentTooLong, Sealing, is_possible_id

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""Total length of the chat completions on one page, in bytes. A page has at least one."""

_table = schema.chat_completions


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChat:
    """A chat completion object with its metadata."""

    id: str
    tenant_id: str
    adapter_id: str | None
    """The adapter that answered. None for the base."""
    completion: dict[str, Any]

    @property
    def metadata(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.completion["metadata"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFilter:
    """Which chat completions to list, in the order of their creation. None means all."""

    model: str | None
    metadata: Mapping[str, str]
    """Keys and values that the metadata of a chat completion must have."""
    adapter_ids: Collection[str] | None
    limit: int
    after: str | None
    is_ascending: bool


class ChatStore:
    """Without a secret in `sealing`, nothing is stored, and no chat completion can be read. Blocking.

    The metadata are encrypted like the rest. A tag for each entry lets the database find the chat completions that have
    it.
    """

    def __init__(self, database: Database, sealing: Sealing) -> None:
        self._database = database
        self._sealing = sealing

    def put(self, stored: StoredChat, messages: Sequence[dict[str, Any]], days: int) -> bool:
        """Store a chat completion and the messages of its request for a number of days. Return False if they are too
        long. Raises QuotaExceeded.
        """
        try:
            values = {**self._contents(stored), "messages": self._seal(stored, "messages", list(messages))}
        except ContentTooLong:
            return False
        with self._database.write() as connection:
            hold_tenant(connection, stored.tenant_id)
            now_us = self._database.now_us(connection)
            admit_bytes(connection, stored.tenant_id, len(values["completion"]) + len(values["messages"]), now_us)
            connection.execute(
                insert(_table).values(
                    id=stored.id,
                    tenant_id=stored.tenant_id,
                    adapter_id=stored.adapter_id,
                    model=stored.completion["model"],
                    created_us=now_us,
                    expires_us=now_us + days * DAY_US,
                    **values,
                )
            )
        return True

    def get(self, tenant_id: str, completion_id: str) -> StoredChat | None:
        """Return a tenant's chat completion, or None if it does not exist, has expired, or was encrypted with another
        secret.
        """
        row = self._row(tenant_id, completion_id, _table.c.completion)
        return None if row is None else self._stored(tenant_id, row)

    def messages(self, tenant_id: str, completion_id: str) -> list[dict[str, Any]]:
        """Return the messages of a chat completion's request. Empty if the completion has just been deleted."""
        row = self._row(tenant_id, completion_id, _table.c.messages)
        found: list[dict[str, Any]] | None = (
            None if row is None else self._sealing.open(tenant_id, f"{completion_id} messages", row.messages)
        )
        return found or []

    def page(self, tenant_id: str, wanted: ChatFilter) -> Page[StoredChat]:
        """Return a page of a tenant's chat completions."""
        if not self._sealing.is_open or not is_possible_id(wanted.after or ""):
            return Page((), has_more=False)
        order = _table.c.id.asc() if wanted.is_ascending else _table.c.id.desc()
        with self._database.read() as connection:
            query = select(_table.c.id, _table.c.num_bytes).where(*self._conditions(connection, tenant_id, wanted))
            found = connection.execute(query.order_by(order).limit(wanted.limit + 1)).all()
            sizes = accumulate(row.num_bytes for row in found[: wanted.limit])
            num_shown = sum(index == 0 or size <= MAX_PAGE_BYTES for index, size in enumerate(sizes))
            ids = [row.id for row in found[:num_shown]]
            columns = (_table.c.id, _table.c.adapter_id, _table.c.completion)
            rows = connection.execute(select(*columns).where(_table.c.id.in_(ids)).order_by(order)).all()
        stored = [self._stored(tenant_id, row) for row in rows]
        return Page(tuple(one for one in stored if one is not None), has_more=len(found) > num_shown)

    def update(self, stored: StoredChat) -> bool:
        """Replace the completion object. Return False if it is too long or has been deleted. Raises QuotaExceeded."""
        try:
            values = self._contents(stored)
        except ContentTooLong:
            return False
        with self._database.write() as connection:
            is_it = (_table.c.id == stored.id, _table.c.tenant_id == stored.tenant_id)
            row = connection.execute(select(_table.c.completion).where(*is_it).with_for_update()).one_or_none()
            if row is None:
                return False
            more = len(values["completion"]) - len(row.completion)
            admit_bytes(connection, stored.tenant_id, more, self._database.now_us(connection))
            connection.execute(update(_table).where(*is_it).values(**values))
        return True

    def delete(self, tenant_id: str, completion_id: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(_table).where(_table.c.id == completion_id, _table.c.tenant_id == tenant_id))

    def _conditions(self, connection: Connection, tenant_id: str, wanted: ChatFilter) -> list[ColumnElement[bool]]:
        now_us = self._database.now_us(connection)
        conditions = [_table.c.tenant_id == tenant_id, _table.c.expires_us > now_us]
        if wanted.after is not None:
            conditions.append(_table.c.id > wanted.after if wanted.is_ascending else _table.c.id < wanted.after)
        if wanted.model is not None:
            conditions.append(_table.c.model == wanted.model)
        if wanted.adapter_ids is not None:
            conditions.append(_table.c.adapter_id.in_(wanted.adapter_ids))
        tags = [self._sealing.tag(tenant_id, _entry(*entry)) for entry in wanted.metadata.items()]
        return [*conditions, and_(True, *(_table.c.metadata_tags.contains(tag) for tag in tags))]

    def _row(self, tenant_id: str, completion_id: str, content: ColumnElement[bytes]) -> Row[*tuple[Any, ...]] | None:
        if not self._sealing.is_open or not is_possible_id(completion_id):
            return None
        with self._database.read() as connection:
            query = select(_table.c.id, _table.c.adapter_id, _table.c.expires_us, content)
            query = query.where(_table.c.id == completion_id, _table.c.tenant_id == tenant_id)
            row = connection.execute(query).one_or_none()
            return None if row is None or row.expires_us <= self._database.now_us(connection) else row

    def _stored(self, tenant_id: str, row: Row[*tuple[Any, ...]]) -> StoredChat | None:
        document = self._sealing.open(tenant_id, row.id, row.completion)
        if document is None:
            return None
        return StoredChat(id=row.id, tenant_id=tenant_id, adapter_id=row.adapter_id, completion=document)

    def _contents(self, stored: StoredChat) -> dict[str, Any]:
        encoded = msgspec.json.encode(stored.completion)
        tags = [self._sealing.tag(stored.tenant_id, _entry(*entry)) for entry in stored.metadata.items()]
        return {
            "completion": self._sealing.seal(stored.tenant_id, stored.id, encoded),
            "num_bytes": len(encoded),
            "metadata_tags": " ".join(tags),
        }

    def _seal(self, stored: StoredChat, what: str, document: Any) -> bytes:
        return self._sealing.seal(stored.tenant_id, f"{stored.id} {what}", document)


def _entry(key: str, value: str) -> str:
    # The key's length keeps the pairs ("a", "bc") and ("ab", "c") apart.
    return f"metadata {len(key)} {key}{value}"

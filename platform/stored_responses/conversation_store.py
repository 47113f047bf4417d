"""Stores conversations in the database, item by item."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.stored_responses.response_store import DAY_US, admit_bytes
from loramux.platform.stored_responses.sealing import Sealing, is_possible_id

MAX_CONVERSATIONS = 10_000
"""Maximum number of a tenant's conversations."""
MAX_TOTAL_BYTES = 1 << 30
"""Maximum total length of a tenant's conversations, in bytes. Only items that a client adds itself are refused."""
MAX_ITEMS = 4096
MAX_BYTES = 4 * 1024 * 1024
"""Maximum length of a conversation's items, in bytes. The items of running responses can exceed both limits twofold."""

_conversations, _items = schema.conversations, schema.conversation_items


class ConversationFull(Exception):
    """A limit on the tenant's conversations or on this conversation would be exceeded."""


class DuplicateItem(Exception):
    """The conversation already has an item with this ID, or two new items have it. `index` is the item's index."""

    def __init__(self, index: int) -> None:
        super().__init__(f"item {index} has the ID of another item")
        self.index = index


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    id: str
    tenant_id: str
    metadata: Mapping[str, str]
    created_us: int
    adapter_ids: tuple[str | None, ...]
    """The adapters that have answered in the conversation. None stands for the base."""
    num_items: int
    num_bytes: int

    @property
    def home(self) -> str:
        """The part of the ID after the underscore."""
        return self.id.partition("_")[2]


@dataclass(frozen=True, slots=True)
class Answered:
    """The adapters from which the items of a conversation's response come. None stands for the base."""

    adapter_ids: Collection[str | None]


class ConversationStore:
    """Without a secret in `sealing`, nothing is stored, and no conversation can be read. Blocking.

    A conversation expires when nothing has been added to it for the tenant's number of days.
    """

    def __init__(self, database: Database, sealing: Sealing) -> None:
        self._database = database
        self._sealing = sealing

    def create(self, tenant_id: str, metadata: Mapping[str, str], days: int) -> StoredConversation:
        """Create an empty conversation. Raises ConversationFull, ContentTooLong or QuotaExceeded."""
        conversation_id, num_bytes = new_id("conv"), len(msgspec.json.encode(metadata))
        sealed = self._sealing.seal(tenant_id, conversation_id, metadata)
        tenants = schema.tenants
        with self._database.write() as connection:
            # The lock makes the calls of a tenant count each other's conversations.
            locked = select(tenants.c.id).where(tenants.c.id == tenant_id)
            connection.execute(locked.with_for_update(key_share=True))
            self._check_total(connection, tenant_id, num_bytes, num_new=1)
            now_us = self._database.now_us(connection)
            admit_bytes(connection, tenant_id, num_bytes, now_us)
            connection.execute(
                insert(_conversations).values(
                    id=conversation_id,
                    tenant_id=tenant_id,
                    adapter_ids=[],
                    num_items=0,
                    num_bytes=num_bytes,
                    next_position=0,
                    created_us=now_us,
                    expires_us=now_us + days * DAY_US,
                    metadata=sealed,
                )
            )
        return StoredConversation(
            id=conversation_id,
            tenant_id=tenant_id,
            metadata=metadata,
            created_us=now_us,
            adapter_ids=(),
            num_items=0,
            num_bytes=num_bytes,
        )

    def get(self, tenant_id: str, conversation_id: str) -> StoredConversation | None:
        """Return a tenant's conversation, or None if it does not exist, has expired, or was encrypted with another
        secret.
        """
        if not self._sealing.is_open or not is_possible_id(conversation_id):
            return None
        with self._database.read() as connection:
            query = select(_conversations).where(
                _conversations.c.id == conversation_id, _conversations.c.tenant_id == tenant_id
            )
            row = connection.execute(query).one_or_none()
            if row is None or row.expires_us <= self._database.now_us(connection):
                return None
        metadata = self._sealing.open(tenant_id, conversation_id, row.metadata)
        if metadata is None:
            return None
        return StoredConversation(
            id=conversation_id,
            tenant_id=tenant_id,
            metadata=metadata,
            created_us=row.created_us,
            adapter_ids=tuple(row.adapter_ids),
            num_items=row.num_items,
            num_bytes=row.num_bytes,
        )

    def items(self, conversation: StoredConversation) -> list[dict[str, Any]]:
        """Return all items, oldest first."""
        query = select(_items).where(_items.c.conversation_id == conversation.id).order_by(_items.c.position)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        found = [self._opened(conversation, row) for row in rows]
        return [item for item in found if item is not None]

    def item(self, conversation: StoredConversation, item_id: str) -> dict[str, Any] | None:
        with self._database.read() as connection:
            row = connection.execute(select(_items).where(*self._named(conversation, item_id))).one_or_none()
        return None if row is None else self._opened(conversation, row)

    def append(
        self,
        tenant_id: str,
        conversation_id: str,
        items: Sequence[dict[str, Any]],
        days: int,
        answered: Answered | None = None,
    ) -> bool:
        """Add items with IDs, and extend the life of the conversation. Return False if it does not exist.

        With `answered`, they are the items of a response: items that the conversation already has are left out, the
        limits are twice as high, and no quota refuses them. Raises ConversationFull, ContentTooLong, DuplicateItem or
        QuotaExceeded.
        """
        add = self.adding(tenant_id, conversation_id, items, days, answered)
        with self._database.write() as connection:
            return add(connection)

    def adding(
        self,
        tenant_id: str,
        conversation_id: str,
        items: Sequence[dict[str, Any]],
        days: int,
        answered: Answered | None = None,
    ) -> Callable[[Connection], bool]:
        """Return what `append` does in its transaction, for a transaction that does more. Raises ContentTooLong."""
        slack = 1 if answered is None else 2
        encoded = [msgspec.json.encode(item) for item in items]
        keys = [self._key(tenant_id, conversation_id, item["id"]) for item in items]
        sealed = [
            self._sealing.seal(tenant_id, f"{conversation_id} {key}", content)
            for key, content in zip(keys, encoded, strict=True)
        ]

        def add(connection: Connection) -> bool:
            query = select(_conversations).where(
                _conversations.c.id == conversation_id, _conversations.c.tenant_id == tenant_id
            )
            row = connection.execute(query.with_for_update(key_share=True)).one_or_none()
            if row is None:
                return False
            of_conversation = _items.c.conversation_id == conversation_id
            known = set(connection.execute(select(_items.c.item_key).where(of_conversation)).scalars())
            added: list[dict[str, Any]] = []
            for index, key in enumerate(keys):
                if key in known and answered is None:
                    raise DuplicateItem(index)
                if key not in known:
                    known.add(key)
                    added.append(
                        {
                            "conversation_id": conversation_id,
                            "position": row.next_position + len(added),
                            "item_key": key,
                            "num_bytes": len(encoded[index]),
                            "content": sealed[index],
                        }
                    )
            num_bytes = sum(one["num_bytes"] for one in added)
            is_full = row.num_items + len(added) > slack * MAX_ITEMS or row.num_bytes + num_bytes > slack * MAX_BYTES
            if is_full:
                raise ConversationFull(
                    f"a conversation can have {MAX_ITEMS} items and {MAX_BYTES} bytes: delete items, or begin another"
                )
            if answered is None:
                self._check_total(connection, tenant_id, num_bytes, num_new=0)
                admit_bytes(connection, tenant_id, num_bytes, self._database.now_us(connection))
            if added:
                connection.execute(insert(_items), added)
            adapter_ids = list(row.adapter_ids)
            if answered is not None:
                adapter_ids += [one for one in answered.adapter_ids if one not in adapter_ids]
            connection.execute(
                update(_conversations)
                .where(_conversations.c.id == conversation_id)
                .values(
                    adapter_ids=adapter_ids,
                    num_items=row.num_items + len(added),
                    num_bytes=row.num_bytes + num_bytes,
                    next_position=row.next_position + len(added),
                    expires_us=max(row.expires_us, self._database.now_us(connection) + days * DAY_US),
                )
            )
            return True

        return add

    def update(self, conversation: StoredConversation, metadata: Mapping[str, str]) -> bool:
        """Replace the metadata. Return False if the conversation has been deleted. Raises ContentTooLong or
        QuotaExceeded.
        """
        tenant_id, table = conversation.tenant_id, _conversations.c
        sealed = self._sealing.seal(tenant_id, conversation.id, metadata)
        is_it = table.id == conversation.id
        with self._database.write() as connection:
            # Another call may have replaced the metadata that this conversation was read with.
            locked = select(table.metadata).where(is_it).with_for_update(key_share=True)
            row = connection.execute(locked).one_or_none()
            if row is None:
                return False
            present = self._sealing.open(tenant_id, conversation.id, row.metadata)
            more = len(msgspec.json.encode(metadata)) - len(msgspec.json.encode(present))
            admit_bytes(connection, tenant_id, more, self._database.now_us(connection))
            values = {"metadata": sealed, "num_bytes": table.num_bytes + more}
            connection.execute(update(_conversations).where(is_it).values(**values))
        return True

    def delete(self, conversation: StoredConversation) -> None:
        with self._database.write() as connection:
            connection.execute(delete(_conversations).where(_conversations.c.id == conversation.id))

    def delete_item(self, conversation: StoredConversation, item_id: str) -> bool:
        """Delete an item. Return False if there is no such item."""
        with self._database.write() as connection:
            # The conversation is locked first, as by `append`.
            table = _conversations.c
            locked = select(table.id).where(table.id == conversation.id).with_for_update(key_share=True)
            connection.execute(locked)
            named = self._named(conversation, item_id)
            row = connection.execute(select(_items.c.num_bytes).where(*named)).one_or_none()
            if row is None:
                return False
            connection.execute(delete(_items).where(*named))
            changed = update(_conversations).where(table.id == conversation.id)
            values = {"num_items": table.num_items - 1, "num_bytes": table.num_bytes - row.num_bytes}
            connection.execute(changed.values(**values))
            return True

    def _check_total(self, connection: Connection, tenant_id: str, num_bytes: int, num_new: int) -> None:
        total = func.coalesce(func.sum(_conversations.c.num_bytes), 0)
        query = select(func.count(), total).where(_conversations.c.tenant_id == tenant_id)
        num_conversations, num_stored = connection.execute(query).one()
        if num_conversations + num_new > MAX_CONVERSATIONS or num_stored + num_bytes > MAX_TOTAL_BYTES:
            raise ConversationFull(
                f"your tenant's conversations must not exceed {MAX_CONVERSATIONS} conversations or {MAX_TOTAL_BYTES} "
                "bytes: delete some"
            )

    def _named(self, conversation: StoredConversation, item_id: str) -> tuple[Any, ...]:
        key = self._key(conversation.tenant_id, conversation.id, item_id)
        return (_items.c.conversation_id == conversation.id, _items.c.item_key == key)

    def _key(self, tenant_id: str, conversation_id: str, item_id: str) -> str:
        # Clients choose IDs, which can contain characters that a database refuses.
        return self._sealing.tag(tenant_id, f"item {conversation_id} {item_id}")

    def _opened(self, conversation: StoredConversation, row: Row[*tuple[Any, ...]]) -> dict[str, Any] | None:
        name = f"{conversation.id} {row.item_key}"
        found: dict[str, Any] | None = self._sealing.open(conversation.tenant_id, name, row.content)
        return found

"""The stores of what is kept for tenants."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.migrations.database import Database
from loramux.platform.quotas.metrics import STORED_BYTES
from loramux.platform.quotas.stock import StockLimits
from loramux.platform.stored_responses.background_store import BackgroundStore
from loramux.platform.stored_responses.changes import Changes
from loramux.platform.stored_responses.chat_store import ChatStore
from loramux.platform.stored_responses.conversation_store import ConversationStore
from loramux.platform.stored_responses.response_store import ResponseStore
from loramux.platform.stored_responses.sealing import Sealing


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """`is_open` is False if the server has no secret to encrypt with, so that it stores nothing."""

    database: Database
    is_open: bool
    responses: ResponseStore
    background: BackgroundStore
    chats: ChatStore
    conversations: ConversationStore
    changes: Changes

    @staticmethod
    def over(database: Database, secret: bytes | None) -> StoredObjects:
        sealing = Sealing(secret)
        return StoredObjects(
            database=database,
            is_open=sealing.is_open,
            responses=ResponseStore(database, sealing),
            background=BackgroundStore(database, sealing),
            chats=ChatStore(database, sealing),
            conversations=ConversationStore(database, sealing),
            changes=Changes(),
        )

    def forget(self, tenant_id: str, request_id: str) -> None:
        """Delete the response or chat completion that a request has stored, if there is one. Blocking."""
        if self.is_open:
            home = request_id.removeprefix("req_")
            self.responses.delete(tenant_id, f"resp_{home}")
            self.chats.delete(tenant_id, f"chatcmpl-{home}")

    def check_room(self, tenant_id: str) -> None:
        """Raise QuotaExceeded if nothing more can be stored for a tenant. Blocking."""
        with self.database.read() as connection:
            StockLimits().check(connection, tenant_id, STORED_BYTES, 1, self.database.now_us(connection))

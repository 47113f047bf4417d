"""The stores of what is kept for tenants."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.migrations.database import Database
from loramux.platform.stored_responses.background_store import BackgroundStore
from loramux.platform.stored_responses.changes import Changes
from loramux.platform.stored_responses.chat_store import ChatStore
from loramux.platform.stored_responses.conversation_store import ConversationStore
from loramux.platform.stored_responses.response_store import ResponseStore
from loramux.platform.stored_responses.sealing import Sealing


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """`is_open` is False if the server has no secret to encrypt with, so that it stores nothing."""

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
            is_open=sealing.is_open,
            responses=ResponseStore(database, sealing),
            background=BackgroundStore(database, sealing),
            chats=ChatStore(database, sealing),
            conversations=ConversationStore(database, sealing),
            changes=Changes(),
        )

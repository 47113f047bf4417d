"""Stores complete responses, and adds their items to conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.generation.plan import Target
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.requests.answers import Document
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.storing import call_storing, check_room
from loramux.platform.responses_api.response_chat import ResponseChat
from loramux.platform.responses_api.stored_items import listed_items
from loramux.platform.stored_responses.conversation_store import Answered, ConversationFull
from loramux.platform.stored_responses.response_store import StoredResponse
from loramux.platform.stored_responses.sealing import ContentTooLong

P = ParamSpec("P")
log = structlog.get_logger(__name__)


def is_stored(services: GatewayServices, target: Target, received: Received[ResponseChat]) -> bool:
    # As in the OpenAI API, a response is stored unless the request forbids it. Here the tenant must allow it, too.
    is_allowed = services.stored.is_open and target.share.response_days > 0
    return is_allowed and received.body.asked.store is not False


async def check_stored(services: GatewayServices, target: Target, received: Received[ResponseChat]) -> None:
    """Raise QuotaExceeded if the request asks for something to be stored and there is no room.

    A response that is stored only by default is answered. Its field `store` says that it is not stored.
    """
    asked = received.body.asked
    is_asked = (bool(asked.store) and is_stored(services, target, received)) or asked.conversation is not None
    # A response in the background is refused when it is stored.
    if is_asked and not asked.background:
        await check_room(services, target.tenant_id)


def home(received: Received[ResponseChat]) -> str:
    """Return the part of the response's ID after the underscore."""
    return received.request_id.removeprefix("req_")


class Keeping:
    """Stores the response of one request, and its items in its conversation."""

    def __init__(self, services: GatewayServices, target: Target, received: Received[ResponseChat]) -> None:
        self._services = services
        self._target = target
        self._received = received

    def stored(self, document: Document) -> StoredResponse:
        """Return the row of the response object `document`."""
        body, adapter, place = self._received.body, self._target.model.adapter, home(self._received)
        return StoredResponse(
            id=document["id"],
            tenant_id=self._target.tenant_id,
            adapter_id=None if adapter is None else adapter.adapter_id,
            input=[*listed_items(body.earlier, place), *listed_items(body.asked.input, place)],
            response=document,
            earlier_adapter_ids=body.earlier_adapter_ids,
        )

    async def keep(self, document: Document) -> Document:
        """Add the items to the conversation, if there is one, and store a complete response object. Return it as it
        turned out. Does nothing for a response in the background: see `adding`.
        """
        asked = self._received.body.asked
        if asked.background:
            return document
        if asked.conversation is not None:
            is_added = await self._is_kept(self._append, document)
            document = {**document, "conversation": {"id": asked.conversation} if is_added else None}
        if not is_stored(self._services, self._target, self._received):
            return document
        stored = self.stored({**document, "store": True})
        return {**document, "store": await self._is_kept(self._put, stored)}

    def adding(self, document: Document) -> Callable[[Connection], bool] | None:
        """Return what adds the items to the conversation, or None if there is no conversation. Blocking. Raises
        ContentTooLong.
        """
        conversation_id = self._received.body.asked.conversation
        if conversation_id is None:
            return None
        target, adapter, days = self._target, self._target.model.adapter, self._target.share.response_days
        items = [*listed_items(self._received.body.asked.input, home(self._received)), *document["output"]]
        own = None if adapter is None else adapter.adapter_id
        answered = Answered({own, *self._received.body.earlier_adapter_ids})
        # The tenant's setting can have changed since the conversation began.
        if days <= 0:
            return lambda _: False
        return self._services.stored.conversations.adding(target.tenant_id, conversation_id, items, days, answered)

    async def _is_kept(self, function: Callable[P, bool], *args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return await call_storing(self._services, function, *args, **kwargs)
        except (SQLAlchemyError, DatabaseTrouble, ConversationFull, ContentTooLong, QuotaExceeded) as error:
            # The answer is complete and charged, so the client gets it, with fields that say what is stored.
            log.warning("a response could not be stored", error=repr(error))
            return False

    def _put(self, stored: StoredResponse) -> bool:
        return self._services.stored.responses.put(stored, self._target.share.response_days)

    def _append(self, document: Document) -> bool:
        add = self.adding(document)
        if add is None:
            return False
        with self._services.database.write() as connection:
            return add(connection)

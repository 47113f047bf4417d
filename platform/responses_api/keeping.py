"""Stores complete responses."""

from __future__ import annotations

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.generation.plan import Target
from loramux.platform.requests.answers import Document
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.response_chat import ResponseChat
from loramux.platform.responses_api.stored_items import listed_items
from loramux.platform.stored_responses.response_store import StoredResponse

log = structlog.get_logger(__name__)


def is_stored(services: GatewayServices, target: Target, received: Received[ResponseChat]) -> bool:
    # As in the OpenAI API, a response is stored unless the request forbids it. Here the tenant must allow it, too.
    is_allowed = services.stored.is_open and target.share.response_days > 0
    return is_allowed and received.body.asked.store is not False


def home(received: Received[ResponseChat]) -> str:
    """Return the part of the response's ID after the underscore."""
    return received.request_id.removeprefix("req_")


class Keeping:
    """Stores the response of one request."""

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
        )

    async def store(self, document: Document) -> Document:
        """Store a complete response object. Return it with `store` as it turned out."""
        services, days = self._services, self._target.share.response_days
        kept = {**document, "store": True}
        try:
            is_kept = await services.call(services.stored.responses.put, self.stored(kept), days)
        except (SQLAlchemyError, DatabaseTrouble) as error:
            # The answer is complete and charged, so the client gets it, and `store` says that it is not stored.
            log.warning("a response could not be stored", error=repr(error))
            is_kept = False
        return {**document, "store": is_kept}

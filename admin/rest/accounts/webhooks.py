"""`/webhooks`: addresses to which a tenant's events are delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from loramux.admin.rest.access import Caller, Reader, Services, Writer, find_tenant, known_names, tenant_filter
from loramux.admin.rest.bodies import NewWebhook, read_json
from loramux.admin.rest.listing import (
    DeletedDocument,
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    paged,
    seconds,
)
from loramux.admin.rest.services import AdminServices
from loramux.migrations.identifiers import new_id
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.events.documents import EventDocument
from loramux.platform.events.webhooks import Webhook
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/webhooks", tags=["webhooks"])

TEST = "webhook.test"


class WebhookDocument(TypedDict):
    """A webhook. `types` is null if events of all types are delivered.

    `sequence` is the number of the tenant's last event that was delivered or skipped. `failures` counts the failed
    attempts since the last delivery, and `last_error` says why the last one failed. A webhook is `disabled` once its
    target has answered with 410.
    """

    id: str
    object: Literal["webhook"]
    tenant_id: str
    tenant: str
    url: str
    types: list[str] | None
    state: str
    sequence: int
    failures: int
    last_error: str | None
    next_attempt_at: int | None
    delivered_at: int | None
    created_at: int


class WebhookWithSecret(WebhookDocument):
    """A webhook with the secret that signs its deliveries. The secret appears only in this response, and is null in the
    response to a repeated call with the same Idempotency-Key.
    """

    secret: str | None


class WebhookTestDocument(TypedDict):
    """The outcome of a test. `status` is the target's, or null if there was no response."""

    object: Literal["webhook_test"]
    event_id: str
    delivered: bool
    status: int | None
    error: str | None


@router.post("", status_code=201, openapi_extra=takes(NewWebhook), responses=errors(409))
async def create_webhook(request: Request, services: Services, caller: Writer) -> WebhookWithSecret:
    """Deliver a tenant's events, from now on, to a URL. A tenant can have ten webhooks.

    Deliveries are signed as standardwebhooks.com describes. An event that cannot be delivered is sent again, after
    growing pauses, for a day, and later events wait for it.
    """
    body = await read_json(request, NewWebhook)
    tenant_id = caller.principal.tenant_id
    if body.tenant is not None:
        tenant_id = (await find_tenant(services, caller, body.tenant)).id
    if tenant_id is None:
        raise InvalidRequest("name the tenant whose events are delivered", param="tenant")
    webhook, secret = await services.call(services.events.webhooks.create, tenant_id, body.url, body.types)
    return {**describe_webhook(webhook, await known_names(services, caller, [tenant_id])), "secret": secret}


@router.get("")
@paged
async def list_webhooks(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[WebhookDocument]:
    """List webhooks, newest first. A key that is restricted to adapters sees none."""
    tenant_id = await tenant_filter(services, caller, tenant)
    if caller.adapter_ids is not None:
        return {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    page = await services.call(services.events.webhooks.list, tenant_id, *paging)
    names = await known_names(services, caller, [webhook.tenant_id for webhook in page.data])
    return list_document(page, lambda webhook: describe_webhook(webhook, names))


@router.get("/{webhook_id}")
async def get_webhook(webhook_id: str, services: Services, caller: Reader) -> WebhookDocument:
    """Get one webhook, without its secret."""
    webhook = await _find(services, caller, webhook_id)
    return describe_webhook(webhook, await known_names(services, caller, [webhook.tenant_id]))


@router.delete("/{webhook_id}")
async def delete_webhook(webhook_id: str, services: Services, caller: Writer) -> DeletedDocument:
    """Delete a webhook. A delivery that is running is not stopped."""
    webhook = await _find(services, caller, webhook_id)
    if not await services.call(services.events.webhooks.delete, webhook.id):
        raise _unknown()
    return {"id": webhook.id, "object": "webhook", "deleted": True}


@router.post("/{webhook_id}/test")
async def send_test_event(webhook_id: str, services: Services, caller: Writer) -> WebhookTestDocument:
    """Send an event of the type `webhook.test` once, now, and report what the target answered."""
    webhook = await _find(services, caller, webhook_id)
    secret = await services.call(services.events.webhooks.secret, webhook)
    if secret is None:
        raise _unknown()
    names = await known_names(services, caller, [webhook.tenant_id])
    document: EventDocument = {
        "id": new_id("evt"),
        "object": "event",
        "type": TEST,
        "sequence": 0,
        "created_at": services.database.now_us() // 1_000_000,
        "tenant_id": webhook.tenant_id,
        "tenant": names.get(webhook.tenant_id),
        "adapter_id": None,
        "model": None,
        "data": {"webhook_id": webhook.id},
    }
    attempt = await services.events.sender.send(webhook.url, secret, document)
    services.metrics.events.count_delivery(attempt.error is None, attempt.seconds)
    return {
        "object": "webhook_test",
        "event_id": document["id"],
        "delivered": attempt.error is None,
        "status": attempt.status,
        "error": attempt.error,
    }


async def _find(services: AdminServices, caller: Caller, webhook_id: str) -> Webhook:
    webhook = await services.call(services.events.webhooks.get, check_identifier(webhook_id, "webhook"))
    if webhook is None or not caller.may_see(webhook.tenant_id) or caller.adapter_ids is not None:
        raise _unknown()
    return webhook


def _unknown() -> NotFound:
    return NotFound("there is no such webhook", code="webhook_not_found")


def describe_webhook(webhook: Webhook, names: Mapping[str, str]) -> WebhookDocument:
    is_failing = webhook.state == "active" and webhook.num_failures > 0
    return {
        "id": webhook.id,
        "object": "webhook",
        "tenant_id": webhook.tenant_id,
        "tenant": names.get(webhook.tenant_id, webhook.tenant_id),
        "url": webhook.url,
        "types": None if webhook.types is None else list(webhook.types),
        "state": webhook.state,
        "sequence": webhook.sequence,
        "failures": webhook.num_failures,
        "last_error": webhook.last_error,
        "next_attempt_at": seconds(webhook.due_us) if is_failing else None,
        "delivered_at": seconds(webhook.delivered_us),
        "created_at": seconds(webhook.created_us),
    }

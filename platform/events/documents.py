"""Events as their readers see them, in streams and in webhooks."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from loramux.platform.events.event_log import Event


class EventDocument(TypedDict):
    """An event. `sequence` numbers a tenant's events or, for a reader of all tenants, all events. `model` is the name
    of the adapter, or null. `data` depends on the type.
    """

    id: str
    object: Literal["event"]
    type: str
    sequence: int
    created_at: int
    tenant_id: str
    tenant: str | None
    adapter_id: str | None
    model: str | None
    data: dict[str, Any]


def describe_event(event: Event, *, is_of_tenant: bool) -> EventDocument:
    return {
        "id": event.id,
        "object": "event",
        "type": event.type,
        "sequence": event.sequence if is_of_tenant else event.position,
        "created_at": event.created_us // 1_000_000,
        "tenant_id": event.tenant_id,
        "tenant": event.tenant,
        "adapter_id": event.adapter_id,
        "model": event.model,
        "data": dict(event.data),
    }

"""Events: what happened to a tenant's adapters and budgets, written in the transaction of the change itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import Connection, ScalarSelect, insert

from loramux.migrations.identifiers import new_ordered_id
from loramux.migrations.schema import events

EventType = Literal[
    "version.ready",
    "version.rejected",
    "alias.moved",
    "adapter.loaded",
    "adapter.evicted",
    "adapter.struck",
    "budget.threshold",
]


def note_event(
    connection: Connection,
    now_us: int,
    kind: EventType,
    data: Mapping[str, Any],
    *,
    tenant_id: str | ScalarSelect[str],
    adapter_id: str | None = None,
) -> None:
    """Record an event. `data` is a small JSON document without secrets. `tenant_id` may be a subquery."""
    row = {"id": new_ordered_id("evt"), "type": kind, "tenant_id": tenant_id, "adapter_id": adapter_id}
    connection.execute(insert(events).values(**row, created_us=now_us, data=dict(data)))

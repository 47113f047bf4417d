"""Events: what happened to a tenant's adapters and budgets, written in the transaction of the change itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, ScalarSelect, insert

from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import events

EventType = Literal[
    "version.ready",
    "version.rejected",
    "alias.moved",
    "canary.failed",
    "adapter.loaded",
    "adapter.evicted",
    "adapter.struck",
    "budget.threshold",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """See `note_event`."""

    kind: EventType
    data: Mapping[str, Any]
    tenant_id: str
    adapter_id: str | None


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
    connection.execute(insert(events).values(_row(now_us, kind, data, tenant_id, adapter_id)))


def note_events(connection: Connection, now_us: int, new: Sequence[NewEvent]) -> None:
    """Record several events, in this order, with one statement."""
    if new:
        rows = [_row(now_us, one.kind, one.data, one.tenant_id, one.adapter_id) for one in new]
        connection.execute(insert(events), rows)


def _row(
    now_us: int,
    kind: EventType,
    data: Mapping[str, Any],
    tenant_id: str | ScalarSelect[str],
    adapter_id: str | None,
) -> dict[str, Any]:
    return {
        "id": new_id("evt"),
        "type": kind,
        "tenant_id": tenant_id,
        "adapter_id": adapter_id,
        "created_us": now_us,
        "data": dict(data),
    }

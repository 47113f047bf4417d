"""Events: what happens to adapters and budgets, and the webhooks that deliver it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from loramux.admin.client.event_text import event_text
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestError
from loramux.admin.console.visit import Visit
from loramux.admin.rest.listing import IDENTIFIER
from loramux.migrations.events import EventType

EVERY_S = 2.0
PAGE = 50
FILTERS = ("tenant", "adapter", "type")


async def facts(visit: Visit) -> dict[str, Any]:
    wanted, after = {name: visit.query(name) for name in FILTERS}, visit.query("after")
    return {
        "wanted": wanted,
        "after": after,
        "types": get_args(EventType),
        "events": await panel(_events(visit, wanted, after)),
        "webhooks": await panel(visit.rest.get("/webhooks", tenant=wanted["tenant"], limit=PAGE)),
    }


async def _events(visit: Visit, wanted: Mapping[str, str | None], after: str | None) -> Document:
    """The page of events, each with its `text`. Raises RestError."""
    adapter_id = None if wanted["adapter"] is None else await _adapter_id(visit, wanted["adapter"], wanted["tenant"])
    params = {"tenant": wanted["tenant"], "adapter": adapter_id, "types": wanted["type"]}
    page = await visit.rest.get("/events/recent", **params, limit=PAGE, after=after)
    return {**page, "data": [{**event, "text": event_text(event)} for event in page["data"]]}


async def _adapter_id(visit: Visit, text: str, tenant: str | None) -> str:
    """Resolve an adapter's identifier, its name within `tenant`, or `TENANT/ADAPTER`. Raises RestError."""
    if re.fullmatch(IDENTIFIER, text):
        return text
    owner, _, name = text.rpartition("/")
    found = (await visit.rest.get("/adapters", tenant=owner or tenant, name=name))["data"]
    if not found:
        raise RestError(404, {"message": f"there is no adapter {text}", "code": "adapter_not_found"})
    return str(found[0]["id"])

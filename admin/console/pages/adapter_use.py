"""Usage and latency of an adapter's versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loramux.admin.console.latency import Latency, latency_of
from loramux.admin.console.rest_calls import Document, RestCalls
from loramux.platform.ledger.settlement import FAILURES

DAY_S = 86_400


async def use_by_version(rest: RestCalls, adapter: Document, others: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """Return the requests, failures and tokens of the last day by version ID, summed over the owner and the grantees
    `others`.
    """
    now = rest.now
    pages = await asyncio.gather(
        *(
            rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="version,status", tenant=tenant)
            for tenant in (adapter["tenant"], *others)
        )
    )
    found: dict[str, dict[str, int]] = {}
    for row in (row for page in pages for bucket in page["data"] for row in bucket["results"]):
        sums = found.setdefault(row["version"] or "", {"requests": 0, "failed": 0, "tokens": 0})
        sums["requests"] += row["requests"]
        sums["tokens"] += row["prompt_tokens"] + row["completion_tokens"]
        if row["status"] in FAILURES:
            sums["failed"] += row["requests"]
    return found


async def speed_by_version(rest: RestCalls, adapter: Document) -> dict[str, Latency]:
    events = (await rest.get("/usage/events", tenant=adapter["tenant"], limit=100))["data"]
    by_version: dict[str, list[Document]] = {}
    for event in events:
        by_version.setdefault(event["adapter_version_id"] or "", []).append(event)
    return {version: latency_of(of_version) for version, of_version in by_version.items()}


async def requests_of_adapter(rest: RestCalls, adapter: Document) -> str:
    """Describe the adapter's recent requests for a confirmation page."""
    now = rest.now
    page = await rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="adapter", tenant=adapter["tenant"])
    rows = [row for bucket in page["data"] for row in bucket["results"] if row["adapter"] == adapter["id"]]
    return f"{sum(row['requests'] for row in rows):,} in the last 24 hours by {adapter['tenant']} itself"

"""The first page: health, load, top tenants and latency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client import Gauge
from starlette.responses import Response

from loramux.admin.console.latency import Latency, latency_of
from loramux.admin.console.live import LiveParts, Render
from loramux.admin.console.panels import Recent, panel
from loramux.admin.console.rest_calls import Document, RestCalls
from loramux.admin.console.visit import Visit
from loramux.admin.rest.services import AdminServices

EVERY_S = 2.0
USAGE_FRESH_S = 10.0
NUM_MINUTES = 60
NUM_EVENTS_PAGES = 2
NUM_TOP = 8
DAY_S = 86_400


class Overview:
    """The page and its live parts. Viewers with the same rights share the figures, which are computed once."""

    def __init__(self) -> None:
        self._recent = Recent()
        self._live = LiveParts()

    async def show(self, visit: Visit) -> Response:
        return visit.page("overview.html", **await self._figures(visit))

    async def live(self, visit: Visit) -> Response:
        """Stream the parts. Charts are sent separately, because redrawing them when nothing changed is distracting."""

        def part(template: str) -> Render:
            async def render() -> str:
                return visit.site.templates.render(template, **visit.frame(), **await self._figures(visit))

            return render

        parts = {"figures": part("overview_figures.html"), "charts": part("overview_charts.html")}
        return self._live.stream(visit, EVERY_S, {**parts, "tables": part("overview_tables.html")})

    async def _figures(self, visit: Visit) -> dict[str, Any]:
        rest = visit.rest
        whose = visit.sees
        is_platform = visit.is_platform

        async def health() -> dict[str, Any]:
            return await _health(visit.site.services)

        state, minutes, top, latency, engine = await asyncio.gather(
            self._recent.get("health", 1.0, health),
            self._recent.get(("minutes", whose), USAGE_FRESH_S, lambda: panel(_minutes(rest))),
            self._recent.get(("top", whose), USAGE_FRESH_S, lambda: panel(_top(rest, is_platform))),
            self._recent.get(("latency", whose), USAGE_FRESH_S / 2, lambda: panel(_latency(rest))),
            self._recent.get(("engine", is_platform), 1.0, lambda: panel(_engine(rest, is_platform))),
        )
        return {
            "health": state,
            "minutes": minutes,
            "top": top,
            "latency": latency,
            "engine": engine,
            "refusals": _refusals(visit.site.services) if is_platform else None,
            "goodput": _goodput(visit.site.services) if is_platform else None,
        }


async def _minutes(rest: RestCalls) -> dict[str, Any]:
    """Return the requests and tokens of each minute of the last hour, including minutes without requests."""
    now = rest.now
    first = now // 60 * 60 - (NUM_MINUTES - 1) * 60
    page = await rest.get("/usage", bucket="1m", start=first, end=now + 1, group_by="")
    x = [first + 60 * minute for minute in range(NUM_MINUTES)]
    found = {bucket["start_time"] // 60 * 60: bucket["results"][0] for bucket in page["data"] if bucket["results"]}

    def series(*names: str) -> list[int]:
        return [sum(found[at][name] for name in names) if at in found else 0 for at in x]

    requests, prompt, completion = series("requests"), series("prompt_tokens"), series("completion_tokens")
    return {
        "requests": sum(requests),
        "prompt_tokens": sum(prompt),
        "completion_tokens": sum(completion),
        "requests_chart": {"x": x, "names": ["requests"], "y": [requests]},
        "tokens_chart": {"x": x, "names": ["prompt", "completion"], "y": [prompt, completion]},
    }


async def _top(rest: RestCalls, is_platform: bool) -> Sequence[Document]:
    """Return the tenants with the most usage in the last day.

    For a tenant's users, return the models that the tenant used most.
    """
    now = rest.now
    group_by = "tenant" if is_platform else "model"
    page = await rest.get("/usage", start=now - DAY_S, end=now + 1, group_by=group_by, top=NUM_TOP)
    return [row for bucket in page["data"] for row in bucket["results"]]


async def _latency(rest: RestCalls) -> Latency:
    events: list[Document] = []
    after = None
    for _ in range(NUM_EVENTS_PAGES):
        page = await rest.get("/usage/events", limit=100, after=after)
        events += page["data"]
        if not page["has_more"]:
            break
        after = page["last_id"]
    return latency_of(events)


async def _engine(rest: RestCalls, is_platform: bool) -> Document | None:
    return await rest.get("/engine") if is_platform else None


async def _health(services: AdminServices) -> dict[str, Any]:
    return {
        "engine": services.engine.client.is_ready,
        "trouble": services.engine.client.trouble,
        "spooled_bytes": _value(services.metrics.generation.spooled_bytes),
    }


def _goodput(services: AdminServices) -> dict[str, int] | None:
    """Requests of service tiers with an objective since this server started: in time, late and refused. None if there
    are none.
    """
    metrics = services.metrics.generation
    counts = {"in_time": 0, "late": 0, "refused": 0}
    for counter in (metrics.first_tokens, metrics.overload_refusals):
        for metric in counter.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    counts[sample.labels.get("outcome", "refused")] += int(sample.value)
    return counts if any(counts.values()) else None


def _value(gauge: Gauge) -> int:
    return int(sum(sample.value for metric in gauge.collect() for sample in metric.samples))


def _refusals(services: AdminServices) -> list[tuple[str, str, int]]:
    """Requests that exceeded a quota since this server started, by metric and mode. Only `hard` quotas refuse them."""
    samples = [sample for metric in services.metrics.quotas.refusals.collect() for sample in metric.samples]
    counted = [
        (sample.labels.get("metric", "other"), sample.labels.get("mode", "hard"), int(sample.value))
        for sample in samples
        if sample.name.endswith("_total")
    ]
    return sorted(counted, key=lambda item: (item[1] != "hard", -item[2]))

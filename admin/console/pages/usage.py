"""Usage: totals over a time range, as a chart, a table or CSV."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from loramux.admin.console.panels import Panel, panel
from loramux.admin.console.rendering import visible
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Forwarded, Visit

HOUR_S, DAY_S = 3600, 86_400
RANGES = {"1": ("1h", HOUR_S), "7": ("1h", HOUR_S), "30": ("1d", DAY_S), "90": ("1d", DAY_S)}
"""Maps a range in days to its chart's bucket and the bucket's length in seconds."""
BEGINS_S = {"1": HOUR_S, "7": 6 * HOUR_S, "30": DAY_S, "90": DAY_S}
"""Maps a range in days to a number of seconds. The start of the range is rounded down to a multiple of that number, so
that the report begins with a whole rollup.
"""
GROUPS = ("model", "tenant", "key", "endpoint", "service_tier", "status")
MAX_SERIES = 6
MAX_ROWS = 100
MAX_CHARTED = 30
FRESH_S = 10.0
"""Maximum age of cached sums, in seconds. Summing a busy month is expensive."""


async def show(visit: Visit) -> Response:
    params = _params(visit)
    bucket, length_s = RANGES[params["days"]]
    asked = {key: params[key] for key in ("start", "end", "tenant")}
    chosen = (params["days"], params["group_by"], params["tenant"], visit.sees)

    async def series(group: str) -> Panel[Document]:
        return await visit.site.recent.get(
            ("usage series", group, *chosen),
            FRESH_S,
            lambda: panel(visit.rest.get("/usage", **asked, group_by=group, bucket=bucket)),
        )

    sums, events, prices, together = await asyncio.gather(
        visit.site.recent.get(
            ("usage", *chosen),
            FRESH_S,
            lambda: panel(visit.rest.get("/usage", **asked, group_by=params["group_by"], top=MAX_ROWS)),
        ),
        panel(visit.rest.get("/usage/events", tenant=params["tenant"], limit=20)),
        panel(visit.rest.get("/prices", tenant=params["tenant"], limit=20)),
        series(""),
    )
    found = sums.data or {"data": [], "num_results": 0, "total": None}
    rows = [row for page in found["data"] for row in page["results"]]
    # A thousand lines would be unreadable and slow. With more than MAX_CHARTED groups, the chart shows one line for all
    # of them.
    charted = params["group_by"] if found["num_results"] <= MAX_CHARTED else ""
    lines = await series(charted) if charted else together
    return visit.page(
        "usage.html",
        sums=sums,
        rows=rows,
        num_rows=found["num_results"],
        total=found["total"],
        charted=charted,
        chart=_chart(lines.data, charted, params, length_s) if lines.data else None,
        events=events,
        prices=prices,
        has_cost=bool(rows) and "cost_nanos" in rows[0],
        params=params,
        groups=GROUPS if visit.is_platform else tuple(group for group in GROUPS if group != "tenant"),
        ranges=RANGES,
    )


async def download(visit: Visit) -> Response:
    """The usage report as CSV, streamed from the REST API."""
    params = _params(visit)
    asked = {key: params[key] for key in ("start", "end", "tenant", "group_by")}
    return Forwarded(visit, "GET", "/usage", {**asked, "format": "csv"})


def _params(visit: Visit) -> dict[str, Any]:
    days = visit.query("days") or "1"
    group_by = visit.query("group_by") or ("tenant" if visit.is_platform else "model")
    days = days if days in RANGES else "1"
    now = visit.rest.now
    return {
        "days": days,
        "group_by": group_by if group_by in GROUPS else "model",
        "tenant": visit.query("tenant"),
        "start": (now - int(days) * DAY_S) // BEGINS_S[days] * BEGINS_S[days],
        # The end of today, which includes every finished request.
        "end": (now // DAY_S + 1) * DAY_S,
        "now": now,
    }


def _tokens(row: Document) -> int:
    return int(row["prompt_tokens"] + row["completion_tokens"])


def _chart(page: Document, group: str, params: dict[str, Any], length_s: int) -> dict[str, Any]:
    """Tokens over time: one line for each of the largest groups, and one line for all other groups."""
    totals: dict[str, int] = {}
    points: dict[tuple[str, int], int] = {}
    for bucket in page["data"]:
        at = bucket["start_time"] // length_s * length_s
        for row in bucket["results"]:
            name = visible(str(row.get(f"{group}_name") or row[group] or "none")) if group else "tokens"
            totals[name] = totals.get(name, 0) + _tokens(row)
            points[name, at] = points.get((name, at), 0) + _tokens(row)
    names = sorted(totals, key=lambda name: -totals[name])
    shown = names[:MAX_SERIES] if len(names) <= MAX_SERIES else names[: MAX_SERIES - 1]
    x = list(range(params["start"], params["now"] + 1, length_s))
    y = [[points.get((name, at), 0) for at in x] for name in shown]
    if len(names) > len(shown):
        y.append([sum(points.get((name, at), 0) for name in names[len(shown) :]) for at in x])
        shown = [*shown, "others"]
    return {"x": x, "names": shown or ["tokens"], "y": y or [[0 for _ in x]]}

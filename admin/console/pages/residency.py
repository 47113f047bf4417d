"""Residency: the adapters in each tier, how full each tier is, and a picture of the page pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from loramux.admin.console.live import LiveParts
from loramux.admin.console.panels import Recent, panel
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit

TIERS = ("pool", "host", "disk")
EVERY_S = 2.0
WIDTH = 1000.0
"""Width of the bar, in SVG units."""
MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    label: str
    num_pages: int
    x: float
    width: float


class Residency:
    def __init__(self) -> None:
        self._recent = Recent()
        self._live = LiveParts()

    async def show(self, visit: Visit) -> Response:
        return visit.page("residency.html", **await self._facts(visit))

    async def live(self, visit: Visit) -> Response:
        async def render() -> str:
            return visit.site.templates.render("residency_live.html", **visit.frame(), **await self._facts(visit))

        return self._live.stream(visit, EVERY_S, {"residency": render})

    async def _facts(self, visit: Visit) -> dict[str, Any]:
        tier = visit.query("tier")
        tier = tier if tier in TIERS else "pool"
        servers = await self._servers(visit)
        chosen = visit.query("replica")
        replica = next((one["id"] for one in servers if one["id"] == chosen), None)
        found = await self._recent.get(
            (tier, replica, visit.sees),
            EVERY_S / 2,
            lambda: panel(visit.rest.get("/residency", tier=tier, replica=replica)),
        )
        pages = found.data["pages"] if found.data else None
        return {
            "tier": tier,
            "tiers": TIERS,
            "servers": servers,
            "replica": replica,
            "residency": found,
            "adapters": found.data["data"][:MAX_SHOWN] if found.data else [],
            "parts_of_pool": picture(pages) if pages else [],
        }

    async def _servers(self, visit: Visit) -> list[Document]:
        """Return the servers that share requests. Empty for a tenant's users, or if this server does not share
        requests.
        """
        if not visit.is_platform:
            return []
        found = await self._recent.get(
            ("replicas", visit.sees), EVERY_S / 2, lambda: panel(visit.rest.get("/replicas"))
        )
        return list(found.data["data"]) if found.data else []


async def place(visit: Visit) -> Response:
    """Pin, unpin or preload a version."""
    form = visit.form
    adapter_id, number, verb = form.text("adapter_id"), form.integer("version", "the version"), form.text("verb")
    verb = verb if verb in ("pin", "unpin", "preload") else "preload"
    placed = await visit.rest.post(f"/adapters/{adapter_id}/versions/{number}/{verb}")
    state = "is pinned" if placed["pinned"] else "is not pinned"
    return visit.done(f"Version {number} {state}; it is {placed['state']} in the pool.")


def picture(pages: Document) -> list[Part]:
    counts = [
        ("adapters", "adapters", pages["adapters"]),
        ("kv", "sequences' keys and values", pages["kv"] - pages["prefix"]),
        ("prefix", "cached prefixes", pages["prefix"]),
        ("free", "free", pages["free"]),
    ]
    total = max(1, sum(count for _, _, count in counts))
    least = 4.0
    widths = [max(least, WIDTH * count / total) if count > 0 else 0.0 for _, _, count in counts]
    excess = sum(widths) - WIDTH
    widths[widths.index(max(widths))] -= excess
    parts, x = [], 0.0
    for (name, label, count), width in zip(counts, widths, strict=True):
        parts.append(Part(name, label, max(0, count), round(x, 2), round(width, 2)))
        x += width
    return parts

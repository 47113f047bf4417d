"""`loramux residency`: the adapters in the pool, in host memory and on disk, and the used part of each tier."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

MIB = 1 << 20


class Tier(StrEnum):
    """A tier that stores copies of adapters."""

    POOL = "pool"
    HOST = "host"
    DISK = "disk"


def residency(
    tier: Annotated[Tier, typer.Option(help="The tier to list.")] = Tier.POOL,
    tenant: AnyTenant = None,
    as_json: AsJson = False,
) -> None:
    """Show which adapters are loaded, most recently used first, and how full each tier is."""
    with connected(as_json) as client:
        document = client.get("residency", tier=tier.value, tenant=tenant)
    if as_json:
        print_json(document)
        return
    print_table(
        ("models", "pages", "MiB", "in use", "pinned", "last used", "digest"),
        [
            (
                " ".join(version["model"] for version in one["versions"]) or None,
                one["num_pages"],
                f"{one['num_bytes'] / MIB:.1f}",
                one["num_users"],
                "yes" if one["is_pinned"] else "",
                shown_time(one["last_used_at"]),
                one["digest"][:12],
            )
            for one in document["data"]
        ],
    )
    if document["has_more"]:
        print(f"and more: only the most recently used adapters of the {tier.value} tier are listed")
    if document["tiers"] is not None:
        _print_fill(document)


def _print_fill(document: Document) -> None:
    print()
    print_table(
        ("tier", "adapters", "used MiB", "of MiB", "evictions"),
        [
            (
                fill["tier"],
                fill["num_adapters"],
                f"{fill['used_bytes'] / MIB:.1f}",
                f"{fill['max_bytes'] / MIB:.1f}",
                fill["num_evictions"],
            )
            for fill in document["tiers"]
        ],
    )
    pages = document["pages"]
    if pages is not None:
        print(
            f"{pages['free']} of {pages['total']} pages are free; {pages['adapters']} contain adapters "
            f"({pages['pinned']} pinned), {pages['kv']} contain keys and values ({pages['prefix']} cached prefixes)"
        )

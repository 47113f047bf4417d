"""`loramux residency`: the adapters in the pool, in host memory and on disk, and how full each tier is."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import (
    connected,
    error_document,
    fail,
    print_json,
    print_table,
    print_text,
    shown_time,
)
from loramux.admin.exit_codes import REFUSED

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document

MIB = 1 << 20


class Tier(StrEnum):
    """A tier that stores copies of adapters."""

    POOL = "pool"
    HOST = "host"
    DISK = "disk"


def residency(
    tier: Annotated[Tier, typer.Option(help="The tier to list.")] = Tier.POOL,
    tenant: AnyTenant = None,
    replica: Annotated[
        str | None, typer.Option(help="The identifier of a server or engine from 'loramux replicas'.", metavar="ID")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List the adapters of every server that shares requests, or of every engine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which adapters are loaded, most recently used first, and how full each tier is.

    With --all, show the adapters of the called server and of each server that shares requests with it, or those of each
    engine of a server with several.
    """
    if every and replica is not None:
        raise typer.BadParameter("use either --replica or --all")
    with connected(as_json) as client:
        documents: dict[str | None, Document]
        if every:
            documents = {
                one: client.get("residency", tier=tier.value, tenant=tenant, replica=one)
                for one in _ids(client, as_json)
            }
        else:
            documents = {replica: client.get("residency", tier=tier.value, tenant=tenant, replica=replica)}
    if as_json:
        # Without --all, the output is the REST document itself.
        print_json(documents if every else documents[replica])
        return
    print_table(
        (*(("server",) if every else ()), "models", "pages", "MiB", "in use", "pinned", "last used", "digest"),
        [
            (
                *((server,) if every else ()),
                " ".join(version["model"] for version in one["versions"]) or None,
                one["num_pages"],
                f"{one['num_bytes'] / MIB:.1f}",
                one["num_users"],
                "yes" if one["is_pinned"] else "",
                shown_time(one["last_used_at"]),
                one["digest"][:12],
            )
            for server, document in documents.items()
            for one in document["data"]
        ],
    )
    for server, document in documents.items():
        if every:
            print_text(f"\nserver {server}")
        if document["has_more"]:
            print_text(f"and more: only the most recently used adapters of the {tier.value} tier are listed")
        if document["tiers"] is not None:
            _print_fill(document)


def _ids(client: AdminClient, as_json: bool) -> list[str]:
    """Return the IDs of the servers or engines that can list their adapters. Exit if there is only this server."""
    found = [one["id"] for one in client.get("replicas")["data"] if one["state"] in ("serving", "draining")]
    if not found:
        message = (
            "this server has one engine and does not share requests with others: start it with --data-parallel-size or "
            "--peer-address, or omit --all"
        )
        fail(message, REFUSED, error_document(message, "replica_not_found") if as_json else None)
    return found


def _print_fill(document: Document) -> None:
    print_text()
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
        print_text(
            f"{pages['free']} of {pages['total']} pages are free; {pages['adapters']} contain adapters "
            f"({pages['pinned']} pinned), {pages['kv']} contain keys and values ({pages['prefix']} cached prefixes)"
        )
        if pages["host_total"]:
            print_text(f"{pages['host_prefix']} of {pages['host_total']} pages in main memory contain evicted prefixes")
        # Older servers do not report the disk.
        if pages.get("disk_total"):
            print_text(f"{pages['disk_prefix']} of {pages['disk_total']} pages on disk contain evicted prefixes")

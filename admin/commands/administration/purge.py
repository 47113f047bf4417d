"""`loramux adapters purge` and `loramux tenants purge`: delete for good, after a preview and a confirmation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import (
    ask,
    connected,
    connected_to,
    error_document,
    fail,
    print_json,
    print_table,
    print_text,
)
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import AdminClient, Document

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

PURGE_TIMEOUT_S = 1800.0
"""How long the command waits for a purge, in seconds. A tenant's ledger can have millions of requests."""

SHOWN = {
    "adapters": "adapters",
    "versions": "versions",
    "shared_weights": "weights that stay, because other adapters have them",
    "running_requests": "running requests",
    "grants": "grants",
    "quotas": "quotas",
    "open_uploads": "open uploads",
    "keys": "keys",
    "prices": "prices",
    "usage_events": "requests in the ledger (their sums stay)",
}
"""The counts of a purge that are shown if they are not 0."""


def purge_adapter(
    model: Annotated[
        str, typer.Argument(metavar="TENANT/ADAPTER[@VERSION]", help="An adapter, or one of its versions.")
    ],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete an adapter with all its versions, or one version, for good: files, rows and cached copies.

    Running requests finish first. The ledger keeps the usage, and version numbers are never used again.
    """
    with connected_to(model, as_json) as (client, named):
        _purge(client, named.path if named.version is None else named.version_path(), dry_run, yes, as_json)


def purge_tenant(
    tenant: Annotated[str, typer.Argument(help="A suspended tenant's slug or identifier.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a suspended tenant for good, with its adapters, keys, quotas, prices and requests.

    Running requests are cancelled. The ledger keeps only sums, and the audit log keeps its entries.
    """
    with connected(as_json) as client:
        _purge(client, client.path("tenants", tenant), dry_run, yes, as_json)


def _purge(client: AdminClient, path: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    found = client.post(f"{path}/purge", {"dry_run": True})
    name = found["name"]
    if dry_run:
        print_json(found) if as_json else _show(found)
        return
    if not yes:
        if as_json or not _is_interactive():
            message = "a purge cannot be undone: add --yes, or --dry-run to see what it would delete"
            fail(message, WRONG_CALL, error_document(message, "not_confirmed") if as_json else None)
        _show(found)
        if ask(f"This cannot be undone. Type {name} to purge it") != name:
            fail("nothing was purged", REFUSED)
    purged = client.post(f"{path}/purge", {"confirm": name}, PURGE_TIMEOUT_S)
    if as_json:
        print_json(purged)
        return
    print_text(f"purged {name}: {_size(purged)}")
    if purged["files_pending"]:
        print_text("loramux: some files are deleted later, once the object store answers", file=sys.stderr)


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _show(found: Document) -> None:
    rows = [(label, f"{found[name]:,}") for name, label in SHOWN.items() if found[name]]
    if found["aliases"]:
        rows.append(("aliases", " ".join(found["aliases"])))
    print_table((f"purge of {found['name']}", "deletes"), [("stored files", _size(found)), *rows])
    if found["blocked_by"] is not None:
        print_text(f"it would be refused now: {found['blocked_by']}")


def _size(found: Document) -> str:
    from loramux.platform.amounts import size_text

    return size_text(found["bytes"])

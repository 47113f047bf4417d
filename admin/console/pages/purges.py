"""Purges of versions, adapters and tenants, each after a page that shows what would be deleted."""

from __future__ import annotations

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.formats import size
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit

NO_UNDO = "Not possible. The audit log keeps who purged it and when."


async def confirm_version(visit: Visit) -> Response:
    path = _version_path(visit)
    return await _ask(visit, path, path, "Its callers get 404; running requests finish first.")


async def purge_version(visit: Visit) -> Response:
    return await _purge(visit, _version_path(visit), f"/adapters/{visit.param('adapter_id')}")


async def confirm_adapter(visit: Visit) -> Response:
    path = f"/adapters/{visit.param('adapter_id')}"
    return await _ask(visit, path, path, "Its callers get 404, from any tenant; running requests finish first.")


async def purge_adapter(visit: Visit) -> Response:
    return await _purge(visit, f"/adapters/{visit.param('adapter_id')}", "/adapters")


async def confirm_tenant(visit: Visit) -> Response:
    path = f"/tenants/{visit.param('tenant')}"
    affects = "The tenant, whose running requests are cancelled, and all callers of its adapters."
    return await _ask(visit, path, path, affects)


async def purge_tenant(visit: Visit) -> Response:
    return await _purge(visit, f"/tenants/{visit.param('tenant')}", "/tenants")


def _version_path(visit: Visit) -> str:
    return f"/adapters/{visit.param('adapter_id')}/versions/{visit.param('number')}"


async def _ask(visit: Visit, path: str, back: str, affects: str) -> Response:
    found = await visit.rest.post(f"{path}/purge", {"dry_run": True})
    name = found["name"]
    return Confirmation(
        title=f"Purge {name}",
        before=f"{counted(found['versions'], 'version')} with {size(found['bytes'])}",
        after="Deleted: files, rows and cached copies. The ledger keeps sums",
        affects=affects if found["blocked_by"] is None else f"Nobody yet: {found['blocked_by']}.",
        undo=NO_UNDO,
        verb=f"Purge {name}",
        path=f"{path}/purge",
        back=back,
        back_label=name,
        fields={"confirm": name},
        facts=_facts(found),
    ).ask(visit)


async def _purge(visit: Visit, path: str, back: str) -> Response:
    purged = await visit.rest.post(f"{path}/purge", {"confirm": visit.form.text("confirm")})
    pending = " Some files are deleted once the object store answers." if purged["files_pending"] else ""
    return visit.done(f"{purged['name']} is purged: {size(purged['bytes'])} deleted.{pending}", back)


def _facts(found: Document) -> list[tuple[str, str]]:
    counts = {
        "Adapters": found["adapters"],
        "Weights that stay, because others have the same": found["shared_weights"],
        "Running requests": found["running_requests"],
        "Grants": found["grants"],
        "Quotas": found["quotas"],
        "Open uploads": found["open_uploads"],
        "Keys": found["keys"],
        "Prices": found["prices"],
        "Requests in the ledger": found["usage_events"],
    }
    facts = [(name, f"{count:,}") for name, count in counts.items() if count]
    return [("Aliases", ", ".join(found["aliases"])), *facts] if found["aliases"] else facts

"""Batches: their progress, and cancelling them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.panels import panel
from loramux.admin.console.visit import Visit

EVERY_S = 2.0
PAGE = 50
OPEN = ("validating", "in_progress")
"""States in which a batch can be cancelled."""


async def confirm_cancel(visit: Visit) -> Response:
    """Show the effects of cancelling a batch, or that the batch has already ended."""
    batch_id = visit.param("batch_id")
    found = await visit.rest.get(f"/batches/{batch_id}")
    if found["finished_at"] is not None or found["state"] in ("finalizing", "cancelling"):
        return visit.done(f"The batch is already {found['state'].replace('_', ' ')}.", "/batches")
    answers = found["num_completed"] + found["num_failed"]
    left = found["num_requests"] - answers
    return Confirmation(
        title="Cancel a batch",
        before=f"{counted(answers, 'request')} of {found['tenant']}'s batch answered, {left:,} to run",
        after="Running requests finish; the others do not run, and the error file names them",
        affects=f"The batch of {found['tenant']}, within seconds. Its answers so far are kept and charged.",
        undo="Not possible: the tenant must create another batch with the rest of the requests.",
        verb="Cancel the batch",
        path=f"/batches/{batch_id}/cancel",
        back="/batches",
        back_label="Batches",
        facts=[("Batch", batch_id), ("Key", found["api_key_id"]), ("Endpoint", found["endpoint"])],
    ).ask(visit)


async def cancel(visit: Visit) -> Response:
    await visit.rest.post(f"/batches/{visit.param('batch_id')}/cancel")
    return visit.done("The batch is being cancelled; its answers so far are kept.", "/batches")


async def facts(visit: Visit) -> dict[str, Any]:
    tenant, after = visit.query("tenant"), visit.query("after")
    listed = await panel(visit.rest.get("/batches", tenant=tenant, limit=PAGE, after=after))
    return {"tenant": tenant, "after": after, "batches": listed, "open_states": OPEN}

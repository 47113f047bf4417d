"""`/audit_log`: who changed what, when and from where."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from loramux.admin.rest.access import Auditor, Services, tenant_filter
from loramux.admin.rest.listing import ListDocument, Paging, TenantParam, list_document, micros, paged, seconds
from loramux.platform.accounts.audit_log import AuditEntry, AuditFilter

router = APIRouter(prefix="/audit_log", tags=["audit_log"])

Printable = r"^[\x20-\x7e]*$"
Time = Annotated[int | None, Query(ge=0, lt=2**40, description="Unix time in seconds.")]


class AuditDocument(TypedDict):
    """One change. `changes` is {field: [before, after]}."""

    id: str
    object: Literal["audit_entry"]
    created_at: int
    actor: str
    address: str | None
    request_id: str | None
    action: str
    tenant_id: str | None
    target: str
    changes: dict[str, list[object]]


@router.get("")
@paged
async def list_audit_log(
    services: Services,
    caller: Auditor,
    paging: Paging,
    tenant: TenantParam = None,
    actor: Annotated[str | None, Query(max_length=40, pattern=Printable, description="A key's identifier.")] = None,
    action: Annotated[
        str | None, Query(max_length=40, pattern=Printable, description="For example `alias.set`, or `alias.*`.")
    ] = None,
    target: Annotated[
        str | None, Query(max_length=200, pattern=Printable, description="Identifier of the changed object.")
    ] = None,
    start: Time = None,
    end: Time = None,
) -> ListDocument[AuditDocument]:
    """List changes, newest first. A tenant's key sees only changes to its tenant's objects. It sees platform keys as
    the actor `platform`, and client addresses only for its own tenant's keys.
    """
    wanted = AuditFilter(
        tenant_id=await tenant_filter(services, caller, tenant),
        actor=actor,
        action=action,
        target=target,
        start_us=micros(start),
        end_us=micros(end),
    )
    return list_document(await services.call(services.audit_log.list, caller.principal, wanted, *paging), _describe)


def _describe(entry: AuditEntry) -> AuditDocument:
    return {
        "id": entry.id,
        "object": "audit_entry",
        "created_at": seconds(entry.created_us),
        "actor": entry.actor,
        "address": entry.address,
        "request_id": entry.request_id,
        "action": entry.action,
        "tenant_id": entry.tenant_id,
        "target": entry.target,
        "changes": dict(entry.changes),
    }

"""`/audit_log`: who changed what, when and from where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from loramux.admin.rest.access import Auditor, Services, known_names, tenant_filter
from loramux.admin.rest.listing import ListDocument, Paging, TenantParam, list_document, micros, paged, seconds
from loramux.platform.accounts.audit_log import AuditEntry, AuditFilter

router = APIRouter(prefix="/audit_log", tags=["audit_log"])

_TARGET = re.compile(r"[a-z]{3}_[0-9a-f]{32}")
Printable = r"^[\x20-\x7e]*$"
Time = Annotated[int | None, Query(ge=0, lt=2**40, description="Unix time in seconds.")]


class AuditDocument(TypedDict):
    """One change. `changes` is {field: [before, after]}.

    `actor_name`, `tenant` and `target_name` are the names of the actor, the tenant and the changed object. An object
    that no longer exists, or that the caller may not know, has no name: its identifier is repeated.
    """

    id: str
    object: Literal["audit_entry"]
    created_at: int
    actor: str
    actor_name: str
    address: str | None
    request_id: str | None
    action: str
    tenant_id: str | None
    tenant: str | None
    target: str
    target_name: str
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
    page = await services.call(services.accounts.audit_log.list, caller.principal, wanted, *paging)
    ids = [one for entry in page.data for one in (entry.actor, entry.tenant_id, _target(entry.target)[0])]
    names = await known_names(services, caller, ids)
    return list_document(page, lambda entry: _describe(entry, names))


def _target(target: str) -> tuple[str, str]:
    """Split a target into an identifier and the rest: an alias is `ada_...:name` and a version is `ada_...@number`."""
    found = _TARGET.match(target)
    return (target, "") if found is None else (found[0], target[found.end() :])


def _describe(entry: AuditEntry, names: Mapping[str, str]) -> AuditDocument:
    target_id, rest = _target(entry.target)
    return {
        "id": entry.id,
        "object": "audit_entry",
        "created_at": seconds(entry.created_us),
        "actor": entry.actor,
        "actor_name": names.get(entry.actor, entry.actor),
        "address": entry.address,
        "request_id": entry.request_id,
        "action": entry.action,
        "tenant_id": entry.tenant_id,
        "tenant": None if entry.tenant_id is None else names.get(entry.tenant_id, entry.tenant_id),
        "target": entry.target,
        "target_name": f"{names.get(target_id, target_id)}{rest}",
        "changes": dict(entry.changes),
    }

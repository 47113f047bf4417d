"""`/bases`: the base models on this database, and the versions that were validated for each."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from typing_extensions import TypedDict

from loramux.adapter_store.registry.bases import Base, RejectedVersion
from loramux.admin.rest.access import PlatformReader, Services
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, whole_list

router = APIRouter(prefix="/bases", tags=["bases"])

BaseId = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="A base's identifier.")]


class BaseDocument(TypedDict):
    """A base that a server on this database serves, or has served. The counts cover versions in the state `ready`.

    `pending` versions have not been validated for the base yet. `is_own` marks the base of the server that answers.
    """

    object: Literal["base"]
    id: str
    served_name: str
    is_own: bool
    created_at: int
    num_validated: int
    num_rejected: int
    num_pending: int


class RejectedVersionDocument(TypedDict):
    """A version that is not valid for a base. `code` and `message` say why."""

    object: Literal["rejected_version"]
    id: str
    tenant_id: str
    tenant: str
    adapter_id: str
    adapter: str
    version: int
    code: str
    message: str
    checked_at: int


@router.get("")
async def list_bases(services: Services, caller: PlatformReader) -> ListDocument[BaseDocument]:
    """List the bases that servers on this database serve or have served, oldest first.

    A server validates ready versions for its base in the background, and refuses requests for other versions.
    """
    bases = await services.call(services.bases.list)
    return whole_list([_describe(base, services.registry.base_id) for base in bases])


@router.get("/{base_id}/rejected")
@paged
async def list_rejected(
    base_id: BaseId, services: Services, caller: PlatformReader, paging: Paging
) -> ListDocument[RejectedVersionDocument]:
    """List the ready versions that were rejected for a base, newest first. Other bases may accept them."""
    await services.call(services.bases.get, base_id)
    page = await services.call(services.bases.rejected, base_id, *paging)
    return list_document(page, _describe_rejected)


def _describe(base: Base, own_id: str | None) -> BaseDocument:
    return {
        "object": "base",
        "id": base.id,
        "served_name": base.served_name,
        "is_own": base.id == own_id,
        "created_at": base.created_us // 1_000_000,
        "num_validated": base.num_validated,
        "num_rejected": base.num_rejected,
        "num_pending": base.num_pending,
    }


def _describe_rejected(version: RejectedVersion) -> RejectedVersionDocument:
    return {
        "object": "rejected_version",
        "id": version.version_id,
        "tenant_id": version.tenant_id,
        "tenant": version.tenant_slug,
        "adapter_id": version.adapter_id,
        "adapter": version.adapter_name,
        "version": version.version,
        "code": version.code,
        "message": version.message,
        "checked_at": version.checked_us // 1_000_000,
    }

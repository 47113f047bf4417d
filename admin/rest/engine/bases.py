"""`/bases`: the base models registered in the database, their servers, and the versions validated for each."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from typing_extensions import TypedDict

from loramux.adapter_store.registry.base_servers import BaseServer, ServerState
from loramux.adapter_store.registry.bases import Base, RejectedVersion
from loramux.admin.rest.access import PlatformAdmin, PlatformReader, Services
from loramux.admin.rest.bodies import TrafficWeights, read_json
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, whole_list
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/bases", tags=["bases"])

BaseId = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="A base's identifier.")]


class BaseServerDocument(TypedDict):
    """A server of a base. A `silent` server has not reported for a minute: it has crashed or cannot reach the database.

    A server that stops normally is removed from the list.
    """

    id: str
    address: str
    state: ServerState
    seen_at: int


class BaseDocument(TypedDict):
    """A base that a server using this database serves, or has served. The counts cover versions in the state `ready`.

    `pending` versions have not been validated for the base yet. `is_own` is true for the base of the server that
    answers the call. `weight` is the base's share of the requests, out of the sum of all weights, or null if the base
    does not take part. `is_shared` is true if a server of the base shares requests with other servers. Otherwise, the
    weight has no effect.
    """

    object: Literal["base"]
    id: str
    served_name: str
    is_own: bool
    created_at: int
    num_validated: int
    num_rejected: int
    num_pending: int
    weight: int | None
    is_shared: bool
    servers: list[BaseServerDocument]


class RevalidatedBase(BaseDocument):
    """A base after its rejected versions became pending again. `num_revalidated` is their number."""

    num_revalidated: int


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
    """List the bases that servers using this database serve or have served, oldest first.

    A server validates ready versions for its base in the background, and refuses requests for versions that have not
    passed validation.
    """
    bases = await services.call(services.adapters.bases.list)
    return whole_list([_describe(base, services.adapters.registry.base_id) for base in bases])


@router.put("/weights", openapi_extra=takes(TrafficWeights), responses=errors(404, 409))
async def set_weights(request: Request, services: Services, caller: PlatformAdmin) -> ListDocument[BaseDocument]:
    """Divide requests between bases by weight, for example between an old and a new version of a model.

    The servers of these bases must share requests. The weights choose one base for all of a tenant's requests for an
    adapter. If no server of that base can run a request, or the version is not valid for that base, another base in the
    list runs the request. The call replaces all weights. An empty list removes them, and each server then runs requests
    only on its own base. Bases with different tokenizers, chat templates or served names are refused.
    """
    body = await read_json(request, TrafficWeights)
    await services.call(services.adapters.bases.set_weights, body.by_base())
    return await list_bases(services, caller)


@router.get("/{base_id}")
async def get_base(base_id: BaseId, services: Services, caller: PlatformReader) -> BaseDocument:
    """Get one base."""
    return _describe(await services.call(services.adapters.bases.get, base_id), services.adapters.registry.base_id)


@router.get("/{base_id}/rejected")
@paged
async def list_rejected(
    base_id: BaseId, services: Services, caller: PlatformReader, paging: Paging
) -> ListDocument[RejectedVersionDocument]:
    """List the ready versions that failed validation for a base, newest first. They may be valid for other bases."""
    await services.call(services.adapters.bases.get, base_id)
    page = await services.call(services.adapters.bases.rejected, base_id, *paging)
    return list_document(page, _describe_rejected)


@router.post("/{base_id}/revalidate")
async def revalidate_base(base_id: BaseId, services: Services, caller: PlatformAdmin) -> RevalidatedBase:
    """Validate a base's rejected versions again, for example after an upgrade that accepts them.

    They are pending until a server of the base has validated them. Results for other bases do not change.
    """
    num_revalidated = await services.call(services.adapters.bases.revalidate, base_id)
    base = await services.call(services.adapters.bases.get, base_id)
    return {**_describe(base, services.adapters.registry.base_id), "num_revalidated": num_revalidated}


@router.delete("/{base_id}", status_code=204, responses=errors(409))
async def forget_base(base_id: BaseId, services: Services, caller: PlatformAdmin) -> Response:
    """Forget a base that no server serves any more, and delete its validation results.

    This is refused while a server serves the base. A later server of the base validates all versions again.
    """
    await services.call(services.adapters.bases.forget, base_id)
    return Response(status_code=204)


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
        "weight": base.weight,
        "is_shared": base.is_shared,
        "servers": [_describe_server(server) for server in base.servers],
    }


def _describe_server(server: BaseServer) -> BaseServerDocument:
    return {
        "id": server.id,
        "address": server.address,
        "state": server.state,
        "seen_at": server.seen_us // 1_000_000,
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

"""`/models`: the model names that a tenant can use in requests."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.admin.rest.access import Reader, Services, find_tenant
from loramux.admin.rest.listing import ListDocument, TenantParam, whole_list
from loramux.platform.errors import InvalidRequest

router = APIRouter(prefix="/models", tags=["models"])

MAX_LISTED = 1000
"""Maximum number of versions in the list."""


class ModelNameDocument(TypedDict):
    """A model name. `tenant` and `adapter_id` belong to the adapter's owner. They are null for the base. `version` is
    null for the base and for an adapter's bare name, which stands for the versions of its alias `default`.
    """

    id: str
    object: Literal["model"]
    tenant: str | None
    adapter_id: str | None
    version: int | None


@router.get("")
async def list_models(
    services: Services, caller: Reader, tenant: TenantParam = None
) -> ListDocument[ModelNameDocument]:
    """List the names of the models that a tenant may call: the base, adapters, and each version in service. Adapters
    that other tenants have granted follow the tenant's own.

    `has_more` means that there are more versions than the list can contain.
    """
    named = tenant or caller.principal.tenant_id
    if named is None:
        raise InvalidRequest("tenant is required", param="tenant", code="missing_required_parameter")
    owner = await find_tenant(services, caller, named)
    found = await services.call(services.adapters.registry.list_callable, owner.id, MAX_LISTED + 1)
    has_default = {ref.adapter_id for ref in await services.call(services.adapters.registry.list_models, owner.id)}
    data: list[ModelNameDocument] = []
    if caller.adapter_ids is None:
        data.append(_describe(services.engine.self_check.served_name))
    seen: set[str] = set()
    for ref in found[:MAX_LISTED]:
        if not caller.principal.may_name(ref.adapter_id):
            continue
        model = f"{ref.tenant_slug}/{ref.adapter_name}"
        if ref.adapter_id in has_default and ref.adapter_id not in seen:
            data.append(_describe(model, ref.tenant_slug, ref.adapter_id))
        seen.add(ref.adapter_id)
        data.append(_describe(f"{model}@{ref.version}", ref.tenant_slug, ref.adapter_id, ref.version))
    return whole_list(data, len(found) > MAX_LISTED)


def _describe(
    name: str, tenant: str | None = None, adapter_id: str | None = None, version: int | None = None
) -> ModelNameDocument:
    return {"id": name, "object": "model", "tenant": tenant, "adapter_id": adapter_id, "version": version}

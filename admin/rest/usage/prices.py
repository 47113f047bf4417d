"""`/prices`: token prices, their effective times and the tenants that they apply to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from loramux.admin.rest.access import (
    Caller,
    PlatformAdmin,
    Reader,
    Services,
    find_tenant,
    known_names,
    tenant_filter,
)
from loramux.admin.rest.bodies import NewPrice, read_json
from loramux.admin.rest.listing import (
    DeletedDocument,
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    micros,
    paged,
    seconds,
)
from loramux.admin.rest.services import AdminServices
from loramux.platform.errors import NotFound
from loramux.platform.ledger.prices import GENERAL_SCOPES, Price
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/prices", tags=["prices"])


class PriceDocument(TypedDict):
    """Prices in nanos (billionths of the currency) per million tokens. `tenant_id` is null for a list price.

    `adapter` is the name of the adapter in `scope`, or null if the price is not for one adapter.
    """

    id: str
    object: Literal["price"]
    tenant_id: str | None
    tenant: str | None
    scope: str
    adapter: str | None
    currency: str
    prompt: int
    cached: int
    completion: int
    batch_percent: int
    flex_percent: int
    priority_percent: int
    effective_at: int
    created_at: int


@router.post("", status_code=201, openapi_extra=takes(NewPrice))
async def add_price(request: Request, services: Services, caller: PlatformAdmin) -> PriceDocument:
    """Add a price that applies from `effective_at` until the next price for the same tenant and scope.

    `scope` is `all`, `base`, `adapters` or an adapter's identifier. A price in force never changes. A request is
    charged at the price in force when it was admitted. A request of a batch is charged `batch_percent` of it. A
    request of the service tier `flex` or `priority` is charged `flex_percent` or `priority_percent` of it.
    """
    body = await read_json(request, NewPrice)
    tenant = None if body.tenant is None else await find_tenant(services, caller, body.tenant)
    price = await services.call(
        services.usage.prices.add,
        tenant_id=None if tenant is None else tenant.id,
        scope=body.scope,
        prompt_nanos=body.prompt,
        cached_nanos=body.cached,
        completion_nanos=body.completion,
        batch_percent=body.batch_percent,
        flex_percent=body.flex_percent,
        priority_percent=body.priority_percent,
        currency=body.currency,
        effective_us=micros(body.effective_at),
    )
    return _describe(price, await _names(services, caller, [price]))


@router.get("")
@paged
async def list_prices(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[PriceDocument]:
    """List prices, newest first. For a tenant, only its own prices and the list prices are included."""
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.usage.prices.list, tenant_id, *paging, caller.adapter_ids)
    names = await _names(services, caller, page.data)
    return list_document(page, lambda price: _describe(price, names))


@router.get("/{price_id}")
async def get_price(price_id: str, services: Services, caller: Reader) -> PriceDocument:
    """Get one price."""
    price = await services.call(services.usage.prices.get, check_identifier(price_id, "price"))
    if price is None or not _may_see(caller, price):
        raise NotFound("there is no such price", code="price_not_found")
    return _describe(price, await _names(services, caller, [price]))


@router.delete("/{price_id}", responses=errors(409))
async def withdraw_price(price_id: str, services: Services, caller: PlatformAdmin) -> DeletedDocument:
    """Withdraw a price that has not yet taken effect."""
    await services.call(services.usage.prices.withdraw, check_identifier(price_id, "price"))
    return {"id": price_id, "object": "price", "deleted": True}


def _may_see(caller: Caller, price: Price) -> bool:
    is_left = price.scope in GENERAL_SCOPES or caller.principal.may_name(price.scope)
    return is_left and (price.tenant_id is None or caller.may_see(price.tenant_id))


async def _names(services: AdminServices, caller: Caller, prices: Iterable[Price]) -> Mapping[str, str]:
    return await known_names(services, caller, [one for price in prices for one in (price.tenant_id, price.scope)])


def _describe(price: Price, names: Mapping[str, str]) -> PriceDocument:
    return {
        "id": price.id,
        "object": "price",
        "tenant_id": price.tenant_id,
        "tenant": None if price.tenant_id is None else names.get(price.tenant_id, price.tenant_id),
        "scope": price.scope,
        "adapter": None if price.scope in GENERAL_SCOPES else names.get(price.scope, price.scope),
        "currency": price.currency,
        "prompt": price.prompt_nanos,
        "cached": price.cached_nanos,
        "completion": price.completion_nanos,
        "batch_percent": price.batch_percent,
        "flex_percent": price.flex_percent,
        "priority_percent": price.priority_percent,
        "effective_at": seconds(price.effective_us),
        "created_at": seconds(price.created_us),
    }

"""Calls that store objects of tenants. Refusals by a quota are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.requests.services import GatewayServices

P = ParamSpec("P")
R = TypeVar("R")


async def call_storing(services: GatewayServices, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking call that stores something: see `GatewayServices.call`. Raises QuotaExceeded."""
    try:
        return await services.call(function, *args, **kwargs)
    except QuotaExceeded as refusal:
        services.metrics.quotas.count_refusal(refusal.policy)
        raise


async def check_room(services: GatewayServices, tenant_id: str) -> None:
    """Raise QuotaExceeded if nothing more can be stored for a tenant."""
    await call_storing(services, services.stored.check_room, tenant_id)

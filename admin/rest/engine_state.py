"""`/engine` and `/residency`: what the engine is doing and which adapters it holds."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter

from loramux.admin.rest.access import PlatformReader, Services
from loramux.admin.rest.listing import Document
from loramux.admin.services import AdminServices
from loramux.engine.messages import Stats
from loramux.platform.engine_client import EngineUnavailable
from loramux.platform.errors import Unavailable

router = APIRouter()

STATS_TIMEOUT_S = 5.0
_NOT_COUNTERS = ("type", "call_id", "adapters")


@router.get("/engine")
async def get_engine(services: Services, caller: PlatformReader) -> Document:
    """The engine's limits and counters; they begin again when it restarts."""
    stats = await _stats(services)
    counters = {name: value for name, value in msgspec.to_builtins(stats).items() if name not in _NOT_COUNTERS}
    info = services.engine.info
    return {"object": "engine", **(msgspec.to_builtins(info) if info else {}), **counters}


@router.get("/residency")
async def list_resident_adapters(services: Services, caller: PlatformReader) -> Document:
    """The adapters in the page pool, by digest."""
    stats = await _stats(services)
    data = [{"object": "resident_adapter", **msgspec.to_builtins(adapter)} for adapter in stats.adapters]
    return {"object": "list", "data": data, "has_more": False}


async def _stats(services: AdminServices) -> Stats:
    try:
        return await services.engine.stats(STATS_TIMEOUT_S)
    except (EngineUnavailable, TimeoutError):
        raise Unavailable("the engine does not answer", code="engine_unavailable", retry_after_s=1.0) from None

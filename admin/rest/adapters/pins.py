"""`/adapters/{id}/versions/{n}/pin`, `unpin` and `preload`: control which versions are in the pool."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.adapter_store.registry.records import AdapterVersion
from loramux.admin.rest.access import Caller, Developer, PlatformAdmin, Services
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.adapters.versions import Number
from loramux.admin.rest.adapters.warm_and_drain import WARM_TIMEOUT_S, check_validated, load_charge
from loramux.admin.rest.services import AdminServices
from loramux.engine.protocol.messages import AdapterState
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import Conflict, Unavailable
from loramux.platform.requests.openapi import errors

router = APIRouter(prefix="/adapters/{adapter_id}/versions/{number}", tags=["residency"])


class PlacementDocument(TypedDict):
    """A version's state in the pool. `loading` means that the load was still in progress when the call returned."""

    object: Literal["placement"]
    adapter_id: str
    version_id: str
    version: int
    digest: str
    state: Literal["resident", "loading", "absent"]
    pinned: bool
    num_pages: int | None


@router.post("/pin")
async def pin_version(adapter_id: str, number: Number, services: Services, caller: PlatformAdmin) -> PlacementDocument:
    """Load a ready version and keep it in the page pool until `unpin`, even across restarts of the engine.

    Refused with `pin_limit` if the pinned adapters would exceed the server's limit on the pinned share of the pool, or
    leave too few pages for a request that was already accepted.
    """
    version = await _find_ready(services, caller, adapter_id, number)
    assert version.digest is not None
    answer = await _told(services.engine.loads.pin(version.digest, True, WARM_TIMEOUT_S))
    if answer is not None and answer.state == "failed":
        raise _failure(answer)
    version = await services.call(services.adapters.pins.set_pinned, version.adapter_id, number, True)
    return _describe(version, answer)


@router.post("/unpin")
async def unpin_version(
    adapter_id: str, number: Number, services: Services, caller: PlatformAdmin
) -> PlacementDocument:
    """Make a version evictable again. It stays loaded until its pages are needed. A repeated call changes nothing.
    Other servers on the same database unpin it after about ten seconds.
    """
    version = await _find(services, caller, adapter_id, number)
    version = await services.call(services.adapters.pins.set_pinned, version.adapter_id, number, False)
    if version.digest is None:
        raise Conflict(f"version {number} is {version.state}", code="version_not_ready", param="version")
    answer = None
    # Another version with the same weights may have its own pin.
    if version.digest not in await services.call(services.adapters.pins.digests):
        # An engine that is not running has no pins.
        with suppress(Unavailable):
            answer = await _told(services.engine.loads.pin(version.digest, False, WARM_TIMEOUT_S))
    return _describe(version, answer)


@router.post("/preload", responses=errors(429))
async def preload_version(adapter_id: str, number: Number, services: Services, caller: Developer) -> PlacementDocument:
    """Load a ready version into the page pool before its first request. The version can be evicted later. A load
    requested with a tenant's key counts against `cold_loads_per_minute`, like a load caused by a request.
    """
    version = await _find_ready(services, caller, adapter_id, number)
    assert version.digest is not None
    charge = load_charge(caller, version.adapter_id)
    answer = await _told(services.engine.loads.load(version.digest, charge, WARM_TIMEOUT_S))
    if answer is not None and answer.state == "failed":
        raise _failure(answer)
    return _describe(version, answer)


async def _told(answer: Awaitable[AdapterState]) -> AdapterState | None:
    """Return the engine's response, or None if the version has not loaded within WARM_TIMEOUT_S. Raises Unavailable."""
    try:
        return await answer
    except TimeoutError:
        return None
    except EngineUnavailable:
        raise Unavailable("the engine does not answer", code="engine_unavailable", retry_after_s=1.0) from None


def _failure(answer: AdapterState) -> Conflict | Unavailable:
    if answer.code in ("pin_limit", "superseded"):
        return Conflict(answer.message or "the pool has no room for this pin", code=answer.code)
    return Unavailable("the adapter cannot be loaded now; try again", code="adapter_unavailable", retry_after_s=5.0)


async def _find(services: AdminServices, caller: Caller, adapter_id: str, number: int) -> AdapterVersion:
    adapter = await find_adapter(services, caller, adapter_id)
    return await services.call(services.adapters.registry.find_version, adapter.id, number)


async def _find_ready(services: AdminServices, caller: Caller, adapter_id: str, number: int) -> AdapterVersion:
    version = await _find(services, caller, adapter_id, number)
    if version.state != "ready":
        raise Conflict(f"version {number} is {version.state}", code="version_not_ready", param="version")
    await check_validated(services, version)
    return version


def _describe(version: AdapterVersion, answer: AdapterState | None) -> PlacementDocument:
    assert version.digest is not None
    states: dict[str, Literal["resident", "absent"]] = {"resident": "resident", "absent": "absent"}
    return {
        "object": "placement",
        "adapter_id": version.adapter_id,
        "version_id": version.id,
        "version": version.number,
        "digest": version.digest,
        "state": "loading" if answer is None else states.get(answer.state, "absent"),
        "pinned": version.pinned_us is not None,
        "num_pages": version.num_pages,
    }

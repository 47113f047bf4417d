"""Has the engine load versions before they enter service and unload versions that leave service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import structlog

from loramux.adapter_store.registry.records import AdapterVersion
from loramux.admin.rest.access import Caller
from loramux.admin.rest.services import AdminServices
from loramux.engine.protocol.messages import Unload
from loramux.platform.accounts.model_names import AdapterNotValidated
from loramux.platform.admission.records import LoadCharge
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import Unavailable

WARM_TIMEOUT_S = 30.0
"""Maximum time, in seconds, for loading each version before an alias moves. After that, the move is refused."""
DRAIN_TIMEOUT_S = 2.0
"""Maximum time, in seconds, that a call waits for running requests. The engine unloads the adapter when they end."""
MAX_UNLOADING = 16
"""Maximum number of versions that one call has the engine unload at the same time."""
LOOK_S = 0.1
"""Time between two looks at the running requests, in seconds."""

_log = structlog.get_logger(__name__)


def load_charge(caller: Caller, adapter_id: str) -> LoadCharge | None:
    """Return the quota charge for a load that the caller requests, or None for an operator, whose loads are not
    charged.
    """
    tenant_id = caller.principal.tenant_id
    if tenant_id is None:
        return None
    return LoadCharge(tenant_id=tenant_id, api_key_id=caller.principal.key_id, adapter_id=adapter_id)


async def check_validated(services: AdminServices, version: AdapterVersion) -> None:
    """Raise AdapterNotValidated if the version is not valid for the base that this server serves."""
    verdict = await services.call(services.adapters.registry.base_verdict, version.id)
    if verdict != "ready":
        raise AdapterNotValidated(f"version {version.number}", verdict, "version")


async def warm(services: AdminServices, caller: Caller, adapter_id: str, numbers: Collection[int]) -> None:
    """Load versions into the engine at the caller's expense. Versions that are not ready are skipped, because the route
    reports them.

    Raises QuotaExceeded, AdapterNotValidated, EngineUnavailable, or Unavailable if a load fails. Earlier versions may
    have been loaded by then.
    """
    charge = load_charge(caller, adapter_id)
    for number in numbers:
        version = await services.call(services.adapters.registry.get_version, adapter_id, number)
        if version is None or version.state != "ready" or version.digest is None:
            continue
        await check_validated(services, version)
        try:
            state = await services.engine.loads.load(version.digest, charge, WARM_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"version {number} could not be loaded within {WARM_TIMEOUT_S:g} s; nothing was changed",
                code="adapter_loading",
                retry_after_s=WARM_TIMEOUT_S,
            ) from None
        if state.state == "failed":
            raise Unavailable(
                f"version {number} cannot be loaded; nothing was changed", code="adapter_unavailable", retry_after_s=5.0
            )


async def drain(services: AdminServices, adapter_id: str, number: int | None = None) -> bool:
    """Have the engine unload an adapter's versions that are out of service, or one of them, once no requests run on
    them. Return whether no request runs on them by now, which can be awaited for DRAIN_TIMEOUT_S.

    The engine's answer does not count: it depends on other tenants that have the same weights.
    """
    unserved = await services.call(services.adapters.version_states.unserved_digests, adapter_id, number)
    is_drained, _ = await asyncio.gather(_has_ended(services, adapter_id, number), _unload(services, unserved))
    if not is_drained:
        _log.info("adapter_draining")
    return is_drained


async def _has_ended(services: AdminServices, adapter_id: str, number: int | None) -> bool:
    """Wait until no request runs on the versions, but not longer than DRAIN_TIMEOUT_S. Return whether none does."""
    end_s = time.monotonic() + DRAIN_TIMEOUT_S
    while await services.call(services.engine.requests.runs_on, adapter_id, number):
        if time.monotonic() >= end_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def _unload(services: AdminServices, digests: Iterable[str]) -> None:
    slots = asyncio.Semaphore(MAX_UNLOADING)

    async def unload(digest: str) -> None:
        # If the engine does not answer in time, it unloads the adapter later. A restarted engine has none loaded.
        async with slots:
            with suppress(TimeoutError, EngineUnavailable):
                await services.engine.client.call(Unload(digest=digest), DRAIN_TIMEOUT_S)

    async with asyncio.TaskGroup() as group:
        for digest in digests:
            group.create_task(unload(digest))

"""Has the engine load versions before they enter service and unload versions that leave service."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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


async def drain(services: AdminServices, digests: Iterable[str]) -> bool:
    """Have the engine unload adapters once no requests run on them. Return True if all have been unloaded by now."""
    is_drained = True
    for digest in digests:
        try:
            state = await services.engine.client.call(Unload(digest=digest), DRAIN_TIMEOUT_S)
        except TimeoutError:
            is_drained = False
        except EngineUnavailable:
            # A restarted engine has no adapters loaded.
            continue
        else:
            is_drained = is_drained and state.state == "absent"
    if not is_drained:
        _log.info("adapter_draining")
    return is_drained

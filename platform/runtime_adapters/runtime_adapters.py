"""Loads an adapter under a name, and takes it out of service: an upload, a validation and a move of an alias in one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass

from sqlalchemy import select

from loramux.adapter_store.errors import AdapterExists, AdapterRejected, AliasNotFound, StoreError
from loramux.adapter_store.ingest.claims import IDENTICAL_TO
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.records import DEFAULT_ALIAS, UNFINISHED, Adapter, AdapterVersion, VersionState
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.migrations.schema import adapter_versions, uploads
from loramux.platform.accounts.model_names import AdapterNotValidated, adapter_label, parse_adapter_name
from loramux.platform.accounts.principals import Principal
from loramux.platform.admission.records import LoadCharge
from loramux.platform.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.store_errors import api_error
from loramux.platform.runtime_adapters.load_sources import LoadSources
from loramux.platform.tenant_slots import TenantQueues
from loramux.platform.threads import call_on

LOAD_SCOPES = ("tenant:develop", "tenant:admin")
VALIDATION_WAIT_S = 600.0
"""How long a call waits for the verdict on its version, in seconds."""
MAX_LOADS = 4
"""Maximum number of a tenant's loads that one server runs at once. Each waits for a verdict and asks the database."""
MAX_WAITING_LOADS = 60
"""Maximum number of a tenant's loads that wait for their turn."""
TURN_WAIT_S = 300.0
"""How long a call waits for its turn, in seconds."""
WARM_WAIT_S = 60.0
"""How long a call waits for the engine to load the adapter, in seconds."""
RETRY_S = 5.0
_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.25
_NOT_SEEN = "source_not_found"
_FIELDS = {"name": "lora_name", "source": "lora_path"}
"""The fields of a request by the parameters of store errors."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter whose name now stands for the version that a call has loaded."""

    name: str
    version: AdapterVersion


class RuntimeAdapters:
    """The caller's tenant owns all adapters that the methods touch. `executor` runs calls that can be slow.

    A key with `tenant:develop` alone may change only adapters all of whose versions have come from `sources`, because
    which version another adapter's name stands for is the decision of an administrator.
    """

    def __init__(
        self,
        services: GatewayServices,
        registry: AdapterRegistry,
        ingest: Ingest,
        sources: LoadSources,
        executor: Executor,
        max_resident: int,
    ) -> None:
        self._services = services
        self._registry = registry
        self._ingest = ingest
        self._sources = sources
        self._executor = executor
        self.max_resident = max_resident
        """Maximum number of adapters in the engine at a time."""
        what = "adapters of this tenant are already being loaded, or wait for it"
        self._loads = TenantQueues(MAX_LOADS, MAX_WAITING_LOADS, TURN_WAIT_S, what, "too_many_loads")
        self._aliases = AdapterAliases(services.database)
        self._states = VersionStates(services.database, registry)

    async def load(
        self, authenticate: Callable[[], Awaitable[Principal]], name: str, path: str, *, replaces: bool
    ) -> LoadedAdapter:
        """Create a version from the files at `path`, wait until it is valid and in the engine, and let the name stand
        for it. Requests in progress finish on the old version.

        `replaces` allows a name that is already in service. Two calls for one name do not move it back: it stands for
        the version of the later one. `authenticate` returns the caller, and is called again when the call's turn has
        come. Raises ApiError, or StoreError.
        """
        principal = await authenticate()
        tenant_id, _, _ = self._requested(principal, name, path)
        async with self._loads.turn(tenant_id):
            # While the call waited, its key may have been revoked or restricted.
            return await self._load(await authenticate(), name, path, replaces=replaces)

    def _requested(self, principal: Principal, name: str, path: str) -> tuple[str, str, str]:
        """Return the tenant, the adapter's name and the URL of the files. Raises ApiError."""
        tenant_id, slug = _tenant_of(principal)
        return tenant_id, _adapter_name(principal, name), self._sources.url(slug, path, "lora_path")

    async def _load(self, principal: Principal, name: str, path: str, *, replaces: bool) -> LoadedAdapter:
        tenant_id, adapter_name, url = self._requested(principal, name, path)
        # A mistyped path must not leave an adapter behind.
        await call_on(self._executor, self._ingest.check_source, url)
        adapter = await self._adapter(principal, tenant_id, adapter_name)
        await self._check_may_change(principal, adapter)
        before = await self._default_of(adapter)
        if adapter.disabled_us is None and before and not replaces:
            raise InvalidRequest(
                f"the adapter {name!r} has already been loaded; set load_inplace to true to replace it",
                code="adapter_already_loaded",
                param="lora_name",
            )
        created = await call_on(self._executor, self._ingest.create_version_from, adapter.id, url)
        version = await self._ready(adapter, created)
        await self._warm(principal, adapter, version)
        await self._point_to(principal, adapter, version, before)
        return LoadedAdapter(adapter.name, version)

    async def unload(self, principal: Principal, name: str) -> str:
        """Take an adapter out of service, as `DELETE /v1/models/{name}` does. Requests in progress finish.

        Returns the adapter's name. Raises ApiError.
        """
        tenant_id, _ = _tenant_of(principal)
        adapter = await self._services.call(self._registry.find_adapter, tenant_id, _adapter_name(principal, name))
        if adapter is None or adapter.disabled_us is not None or not principal.may_name(adapter.id):
            raise NotFound(f"the adapter {name!r} is not loaded", code="model_not_found", param="lora_name")
        await self._check_may_change(principal, adapter)
        await self._services.call(self._states.set_disabled, adapter.id, True)
        return adapter.name

    async def loaded(self, principal: Principal) -> dict[str, str]:
        """Return the tenant's own adapters that requests can use: by name, the model that the name stands for."""
        assert principal.tenant_id is not None
        refs = await self._services.call(self._registry.list_models, principal.tenant_id)
        own = [ref for ref in refs if ref.tenant_slug == principal.tenant_slug and principal.may_name(ref.adapter_id)]
        return {ref.adapter_name: adapter_label(ref) for ref in own}

    async def _adapter(self, principal: Principal, tenant_id: str, name: str) -> Adapter:
        found = await self._services.call(self._registry.find_adapter, tenant_id, name)
        if found is None:
            if principal.adapter_ids is not None:
                raise PermissionDenied("this key is restricted to certain adapters and cannot create others")
            try:
                return await self._services.call(self._registry.create_adapter, tenant_id, name)
            except AdapterExists:
                found = await self._services.call(self._registry.find_adapter, tenant_id, name)
        if found is None or not principal.may_name(found.id):
            raise NotFound("there is no such adapter", code="model_not_found", param="lora_name")
        return found

    async def _check_may_change(self, principal: Principal, adapter: Adapter) -> None:
        if "tenant:admin" in principal.scopes:
            return
        if not await self._services.call(self._is_loaded_only, adapter):
            raise PermissionDenied(
                f"the adapter {adapter.name!r} has versions that were not loaded by such a call, "
                "so this requires a key with the scope tenant:admin"
            )

    def _is_loaded_only(self, adapter: Adapter) -> bool:
        query = (
            select(uploads.c.source_url)
            .select_from(adapter_versions.outerjoin(uploads, uploads.c.id == adapter_versions.c.upload_id))
            .where(adapter_versions.c.adapter_id == adapter.id)
            .distinct()
        )
        with self._services.database.read() as connection:
            urls = connection.execute(query).scalars().all()
        return all(url is not None and self._sources.covers(adapter.tenant_slug, url) for url in urls)

    async def _default_of(self, adapter: Adapter) -> list[int]:
        """Return the versions for which the adapter's bare name stands."""
        try:
            alias = await self._services.call(self._aliases.get, adapter.id, DEFAULT_ALIAS)
        except AliasNotFound:
            return []
        return [target.number for target in alias.targets]

    async def _ready(self, adapter: Adapter, version: AdapterVersion) -> AdapterVersion:
        """Wait for a version's verdict. Return the version, or an earlier one that has the same bytes."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + VALIDATION_WAIT_S, _FIRST_POLL_S
        while version.state in UNFINISHED:
            if loop.time() > deadline_s:
                raise Unavailable(
                    f"version {version.number} is still being validated; repeat the call to wait for it",
                    code="adapter_validating",
                    retry_after_s=RETRY_S,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
            version = await self._version(adapter, version.number)
        identical = version.report.get(IDENTICAL_TO)
        if version.state == "rejected" and identical is not None:
            version = await self._ready(adapter, await self._version(adapter, identical))
        if version.state == "archived":
            archived: tuple[VersionState, ...] = ("archived",)
            return await self._services.call(self._states.restore, adapter.id, version.number, archived)
        if version.state != "ready":
            raise _refusal(version)
        return version

    async def _version(self, adapter: Adapter, number: int) -> AdapterVersion:
        found = await self._services.call(self._registry.get_version, adapter.id, number)
        if found is None:
            raise Conflict("the version was purged while it was being loaded", code="version_not_ready")
        return found

    async def _warm(self, principal: Principal, adapter: Adapter, version: AdapterVersion) -> None:
        """Have the engine load a version at the tenant's expense, before its name is used."""
        verdict = await self._services.call(self._registry.base_verdict, version.id)
        if verdict != "ready":
            raise AdapterNotValidated(f"version {version.number}", verdict, "lora_path")
        assert version.digest is not None
        assert principal.tenant_id is not None
        charge = LoadCharge(tenant_id=principal.tenant_id, api_key_id=principal.key_id, adapter_id=adapter.id)
        try:
            state = await self._services.run.loads.load(version.digest, charge, WARM_WAIT_S)
        except TimeoutError:
            state = None
        if state is None or state.state == "failed":
            raise Unavailable(
                "the engine could not load the adapter; its name was not changed",
                code="adapter_unavailable",
                retry_after_s=RETRY_S,
            )

    async def _point_to(
        self, principal: Principal, adapter: Adapter, version: AdapterVersion, before: Collection[int]
    ) -> None:
        await self._services.call(
            self._aliases.advance, adapter.id, DEFAULT_ALIAS, version.number, before, principal.key_id
        )
        if adapter.disabled_us is not None:
            await self._services.call(self._states.set_disabled, adapter.id, False)


def load_error(error: StoreError) -> ApiError:
    """The API error for a store error. If the files are at fault, so is the path."""
    if isinstance(error, AdapterRejected):
        return _rejection(error.code, error.message, error.param)
    told = api_error(error)
    told.param = None if told.param is None else _FIELDS.get(told.param, told.param)
    return told


def _rejection(code: str, message: str, param: str | None) -> ApiError:
    told = f"the adapter was rejected: {message}" + ("" if param in (None, "source") else f" ({param})")
    # As in vLLM, only a directory that does not exist is a 404.
    kind = NotFound if (code, param) == (_NOT_SEEN, "source") else InvalidRequest
    return kind(told, code=code, param="lora_path")


def _refusal(version: AdapterVersion) -> ApiError:
    if version.state == "quarantined":
        return Conflict("the operator has quarantined these weights", code="quarantined", param="lora_path")
    error = version.report.get("error", {})
    return _rejection(error.get("code", "invalid_value"), error.get("message", "validation failed"), error.get("param"))


def _tenant_of(principal: Principal) -> tuple[str, str]:
    if principal.tenant_id is None or principal.tenant_slug is None or principal.scopes.isdisjoint(LOAD_SCOPES):
        raise PermissionDenied(f"this requires a tenant's key with the scope {' or '.join(LOAD_SCOPES)}")
    return principal.tenant_id, principal.tenant_slug


def _adapter_name(principal: Principal, name: str) -> str:
    parsed = parse_adapter_name(name)
    if parsed is None or parsed.tenant not in (None, principal.tenant_slug):
        raise InvalidRequest("name one of your own adapters", code="invalid_name", param="lora_name")
    if (parsed.version, parsed.digest_prefix, parsed.alias) != (None, None, None):
        raise InvalidRequest("name an adapter without a version or an alias", code="invalid_name", param="lora_name")
    return parsed.adapter

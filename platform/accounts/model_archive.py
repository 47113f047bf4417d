"""Takes the tenant's own models out of service, by the names that requests use."""

from __future__ import annotations

from loramux.adapter_store.errors import AdapterNotFound, VersionInUse, VersionNotFound, VersionNotReady
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.platform.accounts.model_names import AdapterName, ModelNotFound, parse_adapter_name
from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import Conflict, InvalidRequest, PermissionDenied

ARCHIVE_SCOPE = "tenant:admin"


class ModelArchive:
    """Archives adapters and versions. Nothing is deleted, and the admin API undoes each call."""

    def __init__(self, registry: AdapterRegistry, states: VersionStates, served_name: str) -> None:
        self._registry = registry
        self._states = states
        self._served_name = served_name

    def archive(self, principal: Principal, name: str) -> None:
        """Disable the adapter that `name` names, or archive one version of it.

        Raises PermissionDenied without the scope or for the base, ModelNotFound unless the tenant owns the model,
        InvalidRequest for a name with an alias, or Conflict if an alias names the version.
        """
        if ARCHIVE_SCOPE not in principal.scopes or principal.tenant_id is None:
            raise PermissionDenied(f"this requires a key with the scope {ARCHIVE_SCOPE}")
        if name == self._served_name:
            raise PermissionDenied("the base model belongs to the operator", param="model")
        parsed = parse_adapter_name(name)
        if parsed is None or parsed.tenant not in (None, principal.tenant_slug):
            raise ModelNotFound(name)
        if parsed.alias is not None:
            raise InvalidRequest("name an adapter or a version of it, not an alias", param="model")
        try:
            if parsed.version is None and parsed.digest_prefix is None:
                self._disable(principal.tenant_id, name, parsed.adapter)
            else:
                self._archive_version(principal, name, parsed)
        except VersionInUse as error:
            raise Conflict(str(error), code="version_in_use", param="model") from None
        except (AdapterNotFound, VersionNotFound, VersionNotReady):
            # Another call was faster.
            raise ModelNotFound(name) from None

    def _disable(self, tenant_id: str, name: str, adapter_name: str) -> None:
        adapter = self._registry.find_adapter(tenant_id, adapter_name)
        if adapter is None or adapter.disabled_us is not None:
            raise ModelNotFound(name)
        self._states.set_disabled(adapter.id, True)

    def _archive_version(self, principal: Principal, name: str, parsed: AdapterName) -> None:
        assert principal.tenant_slug is not None
        version = self._registry.resolve(
            principal.tenant_slug,
            parsed.adapter,
            version=parsed.version,
            digest_prefix=parsed.digest_prefix,
            caller_id=principal.tenant_id,
        )
        if version is None:
            raise ModelNotFound(name)
        self._states.archive(version.adapter_id, version.version)

"""Resolves the `model` field of a call: the base, or `[tenant/]adapter[@version | :alias]`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from loramux.adapter_store.registry.records import AdapterRef, BaseVerdict
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.platform.accounts.principals import Principal
from loramux.platform.base_draw import BaseDraw, BaseOrder
from loramux.platform.errors import Conflict, InvalidRequest, NotFound, PermissionDenied

INFERENCE_SCOPES = frozenset({"adapters", "base"})

PENDING_RETRY_S = 5.0
"""How long clients should wait before retrying a version that is not yet validated for this base, in seconds."""

_INTEGER = re.compile(r"[1-9][0-9]{0,9}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{12,64})")


class ModelNotFound(NotFound):
    """The model is unknown or not granted. The caller cannot tell which."""

    code = "model_not_found"

    def __init__(self, name: str, param: str = "model") -> None:
        super().__init__(f"The model {name!r} does not exist or you do not have access to it.", param=param)


class AdapterNotValidated(Conflict):
    """The version has not been accepted for the base that this server serves."""

    code = "adapter_not_validated"

    def __init__(self, label: str, verdict: BaseVerdict, param: str = "model") -> None:
        if verdict == "rejected":
            super().__init__(f"{label} is not valid for the base model that this server serves", param=param)
            return
        super().__init__(
            f"{label} has not been validated yet for the base model that this server serves; try again",
            param=param,
            retry_after_s=PENDING_RETRY_S,
        )


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A parsed name with at most one of `version`, `digest_prefix` and `alias`.

    If `tenant` is None, the adapter belongs to the caller's tenant.
    """

    tenant: str | None
    adapter: str
    version: int | None = None
    digest_prefix: str | None = None
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model that a request runs on.

    `name` is the model's name in the ledger: `tenant/adapter@version` or the served base's name. `order` contains the
    bases that the model is valid for, or is None if the request runs on this server's base.
    """

    name: str
    adapter: AdapterRef | None
    order: BaseOrder | None = None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the adapter's version, or None for the base."""
        return None if self.adapter is None else self.adapter.fingerprint


def parse_adapter_name(name: str) -> AdapterName | None:
    """Split a name at `@` or `:`, or return None if the name is malformed. Raises InvalidRequest if it has both."""
    path, has_version, version = name.partition("@")
    path, has_alias, alias = path.partition(":")
    digest = _DIGEST.fullmatch(version)
    if has_version and (has_alias or (":" in version and not version.startswith("sha256:")) or version.count(":") > 1):
        raise InvalidRequest(
            "a model name can have a version (@) or an alias (:), not both", param="model", code="invalid_model_name"
        )
    tenant, slash, adapter = path.rpartition("/")
    if not adapter or (slash and not tenant) or (has_alias and not alias):
        return None
    owner = tenant if slash else None
    if not has_version:
        return AdapterName(owner, adapter, alias=alias if has_alias else None)
    if digest is not None:
        return AdapterName(owner, adapter, digest_prefix=digest.group(1))
    return AdapterName(owner, adapter, version=int(version)) if _INTEGER.fullmatch(version) else None


class ModelResolver:
    def __init__(self, registry: AdapterRegistry, served_name: str, draw: BaseDraw | None = None) -> None:
        self._registry = registry
        self._draw = draw
        self.served_name = served_name

    def resolve(self, principal: Principal, name: str, sticky: str | None = None) -> ResolvedModel:
        """Resolve a name, never falling back to the base.

        If the name stands for several versions, equal `sticky` texts get the same version while the weights are
        unchanged. Without `sticky`, the choice is random. Raises ModelNotFound, InvalidRequest, PermissionDenied if the
        key has no inference scope, or AdapterNotValidated if the version is not valid for the served base or, if
        requests are divided between bases, for any of them.
        """
        require_inference(principal)
        if name == self.served_name:
            if "base" not in principal.scopes:
                raise ModelNotFound(name)
            return ResolvedModel(self.served_name, None, self._order(principal, None))
        parsed = parse_adapter_name(name)
        if parsed is None or "adapters" not in principal.scopes or principal.tenant_slug is None:
            raise ModelNotFound(name)
        adapter = self._registry.resolve(
            parsed.tenant or principal.tenant_slug,
            parsed.adapter,
            version=parsed.version,
            digest_prefix=parsed.digest_prefix,
            alias=parsed.alias,
            caller_id=principal.tenant_id,
            sticky=secrets.token_hex(8) if sticky is None else f"{principal.tenant_id}:{sticky}",
        )
        if adapter is None or not principal.may_name(adapter.adapter_id):
            raise ModelNotFound(name)
        order = self._order(principal, adapter.adapter_id)
        is_valid = adapter.base_verdict == "ready"
        if order is not None:
            order = order.among(self._registry.bases_of(adapter.version_id))
            is_valid = bool(order.bases)
        if not is_valid:
            raise AdapterNotValidated(adapter_label(adapter), adapter.base_verdict)
        return ResolvedModel(adapter_label(adapter), adapter, order)

    def _order(self, principal: Principal, adapter_id: str | None) -> BaseOrder | None:
        if self._draw is None or principal.tenant_id is None:
            return None
        return self._draw.order(principal.tenant_id, adapter_id)

    def list_models(self, principal: Principal) -> list[ResolvedModel]:
        """List the models that the principal can call without naming a version or an alias, the base first."""
        require_inference(principal)
        models = [ResolvedModel(self.served_name, None)] if "base" in principal.scopes else []
        if "adapters" in principal.scopes and principal.tenant_id is not None:
            refs = self._registry.list_models(principal.tenant_id, () if self._draw is None else self._draw.bases)
            models += [
                ResolvedModel(adapter_label(adapter), adapter)
                for adapter in refs
                if principal.may_name(adapter.adapter_id)
            ]
        return models


def adapter_label(adapter: AdapterRef) -> str:
    return f"{adapter.tenant_slug}/{adapter.adapter_name}@{adapter.version}"


def require_inference(principal: Principal) -> str:
    """Return the caller's tenant. Raises PermissionDenied unless the caller may call models."""
    if principal.tenant_id is None or principal.scopes.isdisjoint(INFERENCE_SCOPES):
        raise PermissionDenied("this key cannot call models: use a tenant's key with an inference scope")
    return principal.tenant_id

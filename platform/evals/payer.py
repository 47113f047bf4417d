"""Decides as whom an eval's requests run, and whether they are charged."""

from __future__ import annotations

from loramux.platform.accounts.keys import ApiKey
from loramux.platform.accounts.model_names import INFERENCE_SCOPES
from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import PermissionDenied

OPERATOR = "operator"


def payer(tenant_id: str, tenant_slug: str, key: ApiKey | None, now_us: int) -> Principal:
    """Return the caller of an eval's requests: the tenant, with the limits of the key that started the eval.

    Without a key, the operator runs the eval as the tenant. Raises PermissionDenied if the key is no longer valid.
    """
    if key is None:
        return Principal(OPERATOR, tenant_id, tenant_slug, INFERENCE_SCOPES)
    if key.revoked_us is not None or (key.expires_us is not None and key.expires_us <= now_us):
        raise PermissionDenied("the key that started the eval has been revoked or has expired")
    scopes = INFERENCE_SCOPES if key.adapter_ids is None else frozenset({"adapters"})
    tiers = key.max_service_tier, key.default_service_tier
    return Principal(key.id, tenant_id, tenant_slug, scopes, key.adapter_ids, *tiers)

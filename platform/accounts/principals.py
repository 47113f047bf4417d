"""Who is calling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. A platform administrator belongs to no tenant and therefore cannot infer."""

    key_id: str
    tenant_id: str | None
    tenant_slug: str | None
    scopes: frozenset[str]
    adapter_ids: frozenset[str] | None = None
    """The adapters that the key may name; None: all that its tenant may call."""

    def may_name(self, adapter_id: str | None) -> bool:
        """Whether the key's own limit leaves it the adapter; its tenant's rights are another matter.

        None stands for things without an adapter, such as requests of the base. A limited key may not see those.
        """
        return self.adapter_ids is None or adapter_id in self.adapter_ids

    @property
    def is_platform_admin(self) -> bool:
        return "platform:admin" in self.scopes

    @property
    def holder(self) -> str:
        """Who takes places on the admin side: the tenant, or a key of the platform by itself."""
        return self.tenant_id or self.key_id

from __future__ import annotations

from typing import Any

from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import TenantChanges, Tenants
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

KEY = b"the key of the stored responses."
"""The secret with which gateways encrypt what they store for tenants."""


def allow(database: Database, tenant_id: str, days: int = 30) -> None:
    """Let a tenant's answers be stored for a number of days."""
    Tenants(database).update(tenant_id, TenantChanges(response_days=days), lambda tenant: None)


def answers(gateway: Gateway, text: str, **fields: Any) -> None:
    """Make the engine answer with the text."""
    token_ids = gateway.services.prompts.tokenizer.encode(text)[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids, **fields)

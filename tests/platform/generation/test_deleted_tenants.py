from __future__ import annotations

import pytest
from sqlalchemy import delete

from loramux.migrations import schema
from tests.platform.gateways import Gateway

pytestmark = pytest.mark.anyio


async def ask(gateway: Gateway, model: str) -> tuple[int, str | None]:
    answer = await gateway.http.post("/v1/completions", json={"model": model, "prompt": "abc", "max_tokens": 2})
    return answer.status_code, answer.json().get("error", {}).get("code")


@pytest.mark.parametrize("knows_share", [True, False], ids=["share is cached", "share is not cached"])
async def test_cached_key_of_a_deleted_tenant_is_refused(gateway_on_each: Gateway, knows_share: bool) -> None:
    """Another server has deleted the tenant and its keys."""
    gateway = gateway_on_each
    # The first call caches the key and the share, but leaves nothing that keeps the tenant from being deleted.
    gateway.limit("requests_per_minute", 0)
    assert (await ask(gateway, "base"))[0] == 429
    tables = (schema.quota_counters, schema.quota_policies, schema.api_keys, schema.tenants)
    with gateway.database.write() as connection:
        for table in tables:
            connection.execute(delete(table))
    if not knows_share:
        gateway.services.callers.tenants.forget_recent()
    assert await ask(gateway, "base") == (401, "invalid_api_key")
    with gateway.database.read() as connection:
        assert connection.execute(schema.reservations.select()).first() is None

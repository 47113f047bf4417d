from __future__ import annotations

from typing import Any

import httpx


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def new_tenant(http: httpx.AsyncClient, slug: str) -> str:
    response = await http.post("/admin/v1/tenants", json={"slug": slug})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def new_key(http: httpx.AsyncClient, tenant: str | None, *scopes: str) -> dict[str, Any]:
    body: dict[str, Any] = {"tenant": tenant}
    if scopes:
        body["scopes"] = list(scopes)
    response = await http.post("/admin/v1/api_keys", json=body)
    assert response.status_code == 201, response.text
    return dict(response.json())


async def new_bearer(http: httpx.AsyncClient, tenant: str, scopes: list[str] | None = None) -> dict[str, str]:
    made = await http.post("/admin/v1/api_keys", json={"tenant": tenant, "scopes": scopes or ["tenant:read"]})
    return {"authorization": f"Bearer {made.json()['secret']}"}

from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        pytest.param(b"{", "invalid_json", None, id="cut off"),
        pytest.param(b"[]", "invalid_json", None, id="a list"),
        pytest.param(b'{"slug": "a", "slug": "b"}', "invalid_json", None, id="twice"),
        pytest.param(b'{"slug": NaN}', "invalid_json", None, id="nan"),
        pytest.param(b"{}", "missing_required_parameter", "slug", id="missing"),
        pytest.param(b'{"slug": 5}', "invalid_type", "slug", id="number"),
        pytest.param(b'{"slug": "a", "weight": 9}', "unknown_parameter", "weight", id="unknown"),
        pytest.param(b'{"slug": "Acme"}', "invalid_slug", "slug", id="upper case"),
        pytest.param(b'{"slug": "../a"}', "invalid_slug", "slug", id="traversal"),
        pytest.param(b'{"slug": "a\\u0000"}', "invalid_slug", "slug", id="nul"),
        pytest.param(b'{"slug": "a", "display_name": "\\u202e"}', "invalid_value", "display_name", id="bidi"),
        pytest.param(b'{"slug": "a", "display_name": "\\ud800"}', None, None, id="surrogate"),
    ],
)
async def test_invalid_body_returns_400(
    http: httpx.AsyncClient, body: bytes, code: str | None, param: str | None
) -> None:
    response = await http.post("/admin/v1/tenants", content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if code is not None:
        assert (error["code"], error["param"]) == (code, param)
    assert (await http.get("/admin/v1/tenants")).json()["data"] == []


async def test_large_body_returns_413(http: httpx.AsyncClient) -> None:
    response = await http.post("/admin/v1/tenants", content=b'{"slug": "' + b"a" * 70_000 + b'"}')
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")

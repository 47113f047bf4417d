from __future__ import annotations

import httpx
import pytest

from tests.admin.rest.tenants_and_keys import new_tenant

pytestmark = pytest.mark.anyio


async def test_list_is_paged_by_its_last_identifier(http: httpx.AsyncClient) -> None:
    slugs = [f"tenant-{number}" for number in range(7)]
    for slug in slugs:
        await new_tenant(http, slug)
    found, after = [], None
    for _ in range(3):
        params = {"limit": 3} | ({"after": after} if after else {})
        page = (await http.get("/admin/v1/tenants", params=params)).json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        found += [tenant["slug"] for tenant in page["data"]]
        after = page["last_id"]
    assert found == slugs[::-1]
    assert not page["has_more"]
    before = (await http.get("/admin/v1/tenants", params={"limit": 2, "before": after})).json()
    assert [tenant["slug"] for tenant in before["data"]] == ["tenant-2", "tenant-1"]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"limit": "0"}, id="limit 0"),
        pytest.param({"limit": "101"}, id="limit 101"),
        pytest.param({"limit": "x"}, id="limit x"),
        pytest.param({"after": "\x00"}, id="nul"),
        pytest.param({"before": "ten_1"}, id="no identifier"),
    ],
)
async def test_invalid_paging_parameters_are_refused(http: httpx.AsyncClient, params: dict[str, str]) -> None:
    response = await http.get("/admin/v1/tenants", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(params))


async def test_first_of_several_invalid_parameters_is_reported(http: httpx.AsyncClient) -> None:
    response = await http.get("/admin/v1/jobs", params={"limit": "0", "state": "bad", "after": "x"})
    assert response.json()["error"]["param"] == "state"
    response = await http.get("/admin/v1/jobs", params={"after": "x", "limit": "0"})
    assert response.json()["error"]["param"] == "limit"

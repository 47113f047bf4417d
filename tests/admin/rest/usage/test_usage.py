from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.admin.metered_requests import settle_request
from tests.admin.rest.tenants_and_keys import new_key, new_tenant

pytestmark = pytest.mark.anyio


async def test_usage_is_reported_as_buckets_csv_and_events(http: httpx.AsyncClient, admin_side: Any) -> None:
    acme, globex = await new_tenant(http, "acme"), await new_tenant(http, "globex")
    for tenant_id, slug, tokens in ((acme, "acme", 10), (acme, "acme", 20), (globex, "globex", 5)):
        key = await new_key(http, slug)
        settle_request(admin_side, tenant_id, key["id"], "=base", tokens, 2 * tokens)
    report = (await http.get("/admin/v1/usage")).json()
    assert (report["object"], report["has_more"], report["next_page"]) == ("page", False, None)
    (bucket,) = report["data"]
    sums = {"object": "usage.result", "model": "=base", "cached_tokens": 0, "cost_nanos": 0}
    assert bucket["results"] == [
        {**sums, "tenant": "acme", "requests": 2, "prompt_tokens": 30, "completion_tokens": 60},
        {**sums, "tenant": "globex", "requests": 1, "prompt_tokens": 5, "completion_tokens": 10},
    ]
    one = (await http.get("/admin/v1/usage", params={"tenant": "globex", "group_by": "", "bucket": "1h"})).json()
    assert [result["prompt_tokens"] for result in one["data"][0]["results"]] == [5]
    table = await http.get("/admin/v1/usage", params={"format": "csv", "tenant": "acme"})
    assert table.headers["content-type"].startswith("text/csv")
    header, row = table.text.splitlines()
    amounts = "requests,prompt_tokens,cached_tokens,completion_tokens,cost_nanos"
    assert header == f"start_time,end_time,tenant,model,{amounts}"
    assert row.split(",")[2:] == ["acme", "'=base", "2", "30", "0", "60", "0"]
    events = (await http.get("/admin/v1/usage/events", params={"tenant": "acme", "limit": 1})).json()
    assert events["has_more"]
    assert (events["data"][0]["tenant"], events["data"][0]["prompt_tokens"]) == ("acme", 20)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        pytest.param({"start": "10", "end": "10"}, "end", id="empty range"),
        pytest.param({"start": "-1"}, "start", id="negative"),
        pytest.param({"end": "99999999999999999999"}, "end", id="far future"),
        pytest.param({"bucket": "1s"}, "bucket", id="bucket"),
        pytest.param({"bucket": "1m", "start": "0", "end": "1700000000"}, "bucket", id="too many buckets"),
        pytest.param({"group_by": "tenant,tenant"}, "group_by", id="group twice"),
        pytest.param({"group_by": "secret"}, "group_by", id="unknown group"),
        pytest.param({"format": "xml"}, "format", id="format"),
    ],
)
async def test_invalid_report_is_refused(http: httpx.AsyncClient, params: dict[str, str], param: str) -> None:
    response = await http.get("/admin/v1/usage", params=params)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)

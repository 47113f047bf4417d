from __future__ import annotations

import csv
import io
import json
from typing import Any

import httpx
import pytest

from loramux.admin.commands.administration.usage_options import bar
from loramux.platform.ledger import events as ledger_module
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.command_line import Run, printed_json
from tests.admin.metered_requests import settle_request


def spend(admin_side: AdminSide, loramux: Run, tokens: tuple[int, ...] = (10, 30)) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--json"))
    for number in tokens:
        settle_request(admin_side, tenant["id"], key["id"], "=base", number, 2 * number)


def test_usage_is_drawn_and_exported_in_every_format(admin_side: AdminSide, loramux: Run) -> None:
    spend(admin_side, loramux)
    drawn = loramux("usage", "--last", "1d", "--group-by", "tenant,status")
    assert drawn.exit_code == 0
    assert "█" * 20 in drawn.stdout
    (row,) = csv.DictReader(io.StringIO(loramux("usage", "--csv").stdout))
    assert (row["tenant"], row["model"], row["requests"], row["completion_tokens"]) == ("acme", "'=base", "2", "80")
    (line,) = loramux("usage", "--ndjson", "--last", "2h").stdout.splitlines()
    assert json.loads(line)["prompt_tokens"] == 40
    assert printed_json(loramux("costs", "--json"))["currency"] is None
    for wrong in (("--last", "7x"), ("--last", "7d", "--start", "5"), ("--csv", "--json")):
        assert loramux("usage", *wrong).exit_code == 2
    refused = loramux("usage", "--timezone", "Mars/Base", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["param"]) == (1, "timezone")


def test_long_report_shows_only_its_largest_rows(admin_side: AdminSide, loramux: Run) -> None:
    spend(admin_side, loramux)
    globex = printed_json(loramux("tenants", "create", "globex", "--json"))
    settle_request(
        admin_side,
        globex["id"],
        printed_json(loramux("keys", "create", "--tenant", "globex", "--json"))["id"],
        "m",
        1,
        1,
    )
    printed_json(loramux("prices", "add", "--prompt", "0.15", "--completion", "0.6", "--json"))
    drawn = loramux("usage", "--top", "1").stdout
    assert drawn.splitlines()[1].split()[2:6] == ["acme", "=base", "2", "40"]
    assert drawn.splitlines()[2].split()[2:6] == ["all", "2", "3", "41"]
    page = printed_json(loramux("usage", "--top", "1", "--json"))
    assert (page["num_results"], page["total"]["requests"], page["total"]["completion_tokens"]) == (2, 3, 81)
    assert printed_json(loramux("costs", "--top", "1", "--json"))["total"]["amount"] == "0.000000000"
    assert len(loramux("costs", "--top", "1", "--csv").stdout.splitlines()) == 2
    assert json.loads(loramux("usage", "--top", "1", "--bucket", "1d", "--json").stdout)["error"]["param"] == "top"
    assert loramux("usage", "--top", "0").exit_code == 2


def test_prices_and_audit_log_commands(loramux: Run) -> None:
    price = printed_json(loramux("prices", "add", "--prompt", "0.15", "--completion", "0.6", "--json"))
    assert (price["prompt"], price["cached"], price["completion"]) == (150_000_000, 150_000_000, 600_000_000)
    assert "0.15" in loramux("prices", "list").stdout
    assert loramux("prices", "add", "--prompt", "0.0000000001", "--completion", "1").exit_code == 2
    loramux("tenants", "create", "zoe", "--display-name", "Zoë")
    assert '"Zoë"' in loramux("audit", "--action", "tenant.*").stdout
    listed = loramux("audit", "--action", "price.*").stdout
    assert "price.add" in listed


@pytest.mark.parametrize(("amount", "most", "drawn"), [(0, 5, ""), (5, 5, "█" * 20), (1, 10_000, "▏"), (3, 0, "")])
def test_bar_length_is_proportional_to_amount(amount: int, most: int, drawn: str) -> None:
    assert bar(amount, most) == drawn


@pytest.mark.anyio
async def test_export_is_streamed(
    http: httpx.AsyncClient, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "EXPORT_ROWS", 2)
    tenant = (await http.post("/admin/v1/tenants", json={"slug": "acme"})).json()
    key = (await http.post("/admin/v1/api_keys", json={"tenant": "acme"})).json()
    for tokens in range(1, 6):
        settle_request(admin_side, tenant["id"], key["id"], "=base", tokens, 1)
    lines = (await http.get("/admin/v1/usage/events/export")).text.splitlines()
    assert [json.loads(line)["prompt_tokens"] for line in lines] == [1, 2, 3, 4, 5]
    table = await http.get("/admin/v1/usage/events/export", params={"format": "csv", "tenant": "acme"})
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(table.text)))
    assert [row["prompt_tokens"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert {row["model"] for row in rows} == {"'=base"}
    assert (await http.get("/admin/v1/usage/events/export", params={"start": 0, "end": 1})).text == ""
    wrong = await http.get("/admin/v1/usage/events/export", params={"start": 5, "end": 5})
    assert wrong.json()["error"]["param"] == "end"
    assert ADMIN_KEY not in table.text

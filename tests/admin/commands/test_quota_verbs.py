from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest

from loramux.admin.commands.administration.quota_plot import bar
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import printed_json


def test_quotas_are_set_plotted_checked_and_removed(loramux: Callable[..., Any]) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    key = printed_json(loramux("keys", "create", "--tenant", "acme", "--json"))
    for arguments in (
        ("--tenant", "acme", "--metric", "tokens_per_day", "--limit", "1000"),
        ("--key", key["id"], "--metric", "requests_per_minute", "--limit", "5", "--burst", "9", "--mode", "soft"),
        ("--platform", "--metric", "concurrent_requests", "--limit", "0", "--mode", "shadow"),
    ):
        assert loramux("quotas", "set", *arguments).exit_code == 0
    whom = ("--tenant", "acme", "--key", key["id"])
    plot = loramux("quotas", "effective", *whom).stdout
    assert "concurrent_requests  platform (inherited)  shadow" in plot
    assert f"tokens_per_day       tenant                hard    {'·' * 40}" in plot
    rows = list(csv.DictReader(io.StringIO(loramux("quotas", "effective", *whom, "--csv").stdout)))
    assert [(row["metric"], row["limit"], row["remaining"]) for row in rows] == [
        ("concurrent_requests", "0", "0"),
        ("requests_per_minute", "5", "9"),
        ("tokens_per_day", "1000", "1000"),
    ]
    assert [limit["mode"] for limit in printed_json(loramux("quotas", "effective", *whom, "--json"))["data"]] == [
        row["mode"] for row in rows
    ]
    fits = loramux("quotas", "check", *whom, "--prompt-tokens", "900", "--max-tokens", "100")
    assert (fits.exit_code, "the request would be admitted" in fits.stdout) == (0, True)
    trial = ("--metric", "tokens_per_day", "--limit", "999", "--tenant", "acme")
    beyond = loramux("quotas", "check", *trial, "--prompt-tokens", "900", "--max-tokens", "100")
    assert (beyond.exit_code, "400 request_too_large" in beyond.stdout) == (1, True)
    listed = list(csv.DictReader(io.StringIO(loramux("quotas", "list", "--csv").stdout)))
    assert [(row["scope"], row["tenant_id"]) for row in listed] == [
        ("platform", ""),
        ("key", tenant["id"]),
        ("tenant", tenant["id"]),
    ]
    for row in listed:
        assert loramux("quotas", "delete", row["id"]).exit_code == 0
    assert loramux("quotas", "effective", *whom).stdout == "no limits apply\n"


@pytest.mark.parametrize(
    ("used", "reserved", "shown"),
    [(0, 0, "·" * 40), (1, 0, "█" + "·" * 39), (500, 250, "█" * 20 + "▒" * 10 + "·" * 10), (999, 500, "█" * 40)],
    ids=["nothing", "a little", "some", "too much"],
)
def test_bar_shows_used_and_reserved_amounts(used: int, reserved: int, shown: str) -> None:
    assert bar({"used": used, "reserved": reserved, "burst": 1000}) == shown


def test_a_limit_of_nobody_is_refused_with_the_options(loramux: Callable[..., Any]) -> None:
    limit, request = ("--metric", "tokens_per_day", "--limit", "5"), ("--prompt-tokens", "1", "--max-tokens", "1")
    for command in (("set", *limit), ("effective",), ("check", *request)):
        refused = loramux("quotas", *command)
        said = " ".join(refused.stderr.replace("│", " ").split())
        assert (refused.exit_code, "apply to: --tenant, --key" in said) == (2, True), refused.output


def test_money_is_in_the_currency_on_the_command_line_and_in_nanos_over_rest(
    loramux: Callable[..., Any], admin_side: AdminSide
) -> None:
    tenant = printed_json(loramux("tenants", "create", "acme", "--json"))
    limit = ("--tenant", "acme", "--metric", "cost_per_month", "--limit")
    assert loramux("quotas", "set", *limit, "5").stdout == "acme: cost_per_month is limited to 5.00, hard\n"
    listed = printed_json(loramux("quotas", "list", "--json"))["data"]
    assert [(quota["limit"], quota["unit"]) for quota in listed] == [(5_000_000_000, "nanos")]
    assert " 5.00 " in loramux("quotas", "list").stdout
    for verb in ("list", "effective"):
        (row,) = csv.DictReader(io.StringIO(loramux("quotas", verb, "--tenant", "acme", "--csv").stdout))
        assert (row["limit"], row["unit"]) == ("5.000000000", "currency")
    assert "5.00" in loramux("quotas", "effective", "--tenant", "acme").stdout
    assert loramux("quotas", "set", *limit, "2.5").stdout == "acme: cost_per_month is limited to 2.50, hard\n"
    changes = loramux("audit", "--action", "quota.set").stdout
    assert 'limit: "5.00" -> "2.50"' in changes
    refused = loramux("quotas", "set", *limit, "1,5")
    assert (refused.exit_code, "such as 0.15" in refused.stderr) == (2, True)
    beyond = loramux("quotas", "set", *limit, "2000000000")
    assert (beyond.exit_code, "1,000,000,000.00 in the currency" in beyond.stderr) == (1, True)
    day = loramux("quotas", "set", "--tenant", "acme", "--metric", "cost_per_day", "--limit", "3")
    assert "cost_per_day would be 3.00 and could never be reached, because cost_per_month is 2.50" in day.stderr
    now_us = admin_side.services.database.now_us()
    admin_side.services.usage.prices.add(
        tenant_id=tenant["id"],
        scope="all",
        prompt_nanos=10**12,
        cached_nanos=None,
        completion_nanos=10**12,
        effective_us=now_us + 3_000_000,
    )
    price = loramux("prices", "list").stdout
    assert "1,000.00" in price


def test_bytes_are_read_and_shown_with_their_unit(loramux: Callable[..., Any]) -> None:
    loramux("tenants", "create", "acme")
    limit = ("--tenant", "acme", "--metric", "adapter_bytes", "--limit")
    assert loramux("quotas", "set", *limit, "1.5GiB").stdout == "acme: adapter_bytes is limited to 1.5 GiB, hard\n"
    (quota,) = printed_json(loramux("quotas", "list", "--json"))["data"]
    assert quota["limit"] == 3 << 29
    assert "1.5 GiB" in loramux("quotas", "effective", "--tenant", "acme").stdout

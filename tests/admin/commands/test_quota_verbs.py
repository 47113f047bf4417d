from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest

from loramux.admin.commands.quota_plot import bar
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

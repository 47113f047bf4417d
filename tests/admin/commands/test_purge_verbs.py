from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loramux.admin.commands.administration import purge
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import printed_json


@pytest.fixture
def pushed(loramux: Callable[..., Any], make_adapter: Callable[..., Path]) -> None:
    loramux("tenants", "create", "acme")
    for _ in range(2):
        loramux("adapters", "push", make_adapter(), "--tenant", "acme", "--name", "support")


@pytest.mark.usefixtures("pushed")
def test_purge_shows_its_effect_and_needs_a_confirmation(
    loramux: Callable[..., Any], admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = loramux("adapters", "purge", "acme/support@1", "--dry-run")
    assert shown.exit_code == 0
    assert "it would be refused now: the alias 'default' names version 1" in shown.stdout
    assert "KiB" in shown.stdout
    refused = loramux("adapters", "purge", "acme/support@2")
    assert (refused.exit_code, "add --yes" in refused.stderr) == (2, True), "input is not a terminal"
    assert loramux("adapters", "purge", "acme/support@2", "--json").exit_code == 2
    named = loramux("adapters", "purge", "acme/support@1", "--yes")
    assert (named.exit_code, "move it first" in named.stderr) == (1, True)
    monkeypatch.setattr(purge, "_is_interactive", lambda: True)
    mistyped = loramux("adapters", "purge", "acme/support@2", input="acme/support\n")
    assert (mistyped.exit_code, "nothing was purged" in mistyped.stderr) == (1, True)
    assert loramux("adapters", "purge", "acme/support@2", input="").exit_code == 130, "interrupted at the question"
    typed = loramux("adapters", "purge", "acme/support@2", input="acme/support@2\n")
    assert typed.exit_code == 0, typed.output
    assert "purged acme/support@2: " in typed.stdout
    purged = printed_json(loramux("adapters", "purge", "acme/support", "--yes", "--json"))
    assert (purged["versions"], purged["dry_run"]) == (1, False)
    assert list(admin_side.blobs.list_keys()) == []


@pytest.mark.usefixtures("pushed")
def test_tenant_is_suspended_and_then_purged(loramux: Callable[..., Any], admin_side: AdminSide) -> None:
    refused = loramux("tenants", "purge", "acme", "--yes")
    assert (refused.exit_code, "loramux tenants suspend acme" in refused.stderr) == (1, True)
    loramux("tenants", "suspend", "acme")
    assert "versions" in loramux("tenants", "purge", "acme", "--dry-run").stdout
    assert "purged acme: " in loramux("tenants", "purge", "acme", "--yes").stdout
    assert admin_side.services.accounts.tenants.get("acme") is None
    assert loramux("tenants", "create", "acme").exit_code == 0

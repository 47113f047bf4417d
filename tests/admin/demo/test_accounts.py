from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from loramux.admin.client.client import AdminClient
from loramux.admin.demo.accounts import open_accounts
from loramux.admin.demo.server import DemoServer
from tests.admin.admin_side import ADMIN_KEY, AdminSide


def test_the_engine_has_all_adapters_before_the_first_question(
    admin_url: str, admin_side: AdminSide, make_adapter: Callable[..., Path]
) -> None:
    def wait_until(is_so: Callable[[], bool], what: str) -> None:
        assert what == "ready" or is_so()

    server: Any = SimpleNamespace(admin_url=admin_url, admin_key=ADMIN_KEY, wait_until=wait_until)
    adapters = {tenant: make_adapter() for tenant in ("harbour", "chambers", "parcels")}
    with AdminClient(admin_url, ADMIN_KEY) as client:
        accounts = open_accounts(cast(DemoServer, server), client, adapters)
    assert [account.pushed.version for account in accounts] == [1, 1, 1], "no version was created twice"
    assert set(admin_side.engine.resident) == {account.pushed.digest for account in accounts}

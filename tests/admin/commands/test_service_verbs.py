"""`loramux adapters promote|rollback|preload|pin` while others move the alias, or the engine is slow to load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loramux.adapter_store.registry.aliases import MAX_TARGETS
from loramux.admin.client.client import MAX_VERSIONS, AdminClient
from loramux.admin.rest.adapters.warm_and_drain import WARM_TIMEOUT_S
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import Run, printed_json
from tests.admin.rest.adapters.ready_versions import add_ready_versions


@pytest.fixture
def aliases_path(admin_side: AdminSide) -> str:
    services = admin_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("acme").id, "support")
    add_ready_versions(services.database, adapter.id, 3)
    return f"adapters/{adapter.id}/aliases"


def test_a_share_of_requests_does_not_undo_a_rollback(
    loramux: Run, aliases_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        assert loramux("adapters", "promote", f"acme/support@{version}", "--no-warm").exit_code == 0
    put = AdminClient.put

    def put_after_a_rollback(self: AdminClient, path: str, *arguments: Any, **options: Any) -> Any:
        self.post(f"{path}/rollback", {"warm": False})
        return put(self, path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(AdminClient, "put", put_after_a_rollback)
        refused = loramux("adapters", "promote", "acme/support@3", "--percent", 10, "--no-warm", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["code"] == "precondition_failed"
    shown = printed_json(loramux("aliases", "list", "acme/support", "--json"))["data"]
    assert [target["version"] for target in shown[0]["targets"]] == [1]
    moved = printed_json(loramux("adapters", "promote", "acme/support@3", "--percent", 10, "--no-warm", "--json"))
    assert [target["version"] for target in moved["targets"]] == [1, 3]


def test_commands_wait_as_long_as_the_server_may_load(
    loramux: Run, aliases_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, float | None] = {}
    send = AdminClient._send

    def noting_send(self: AdminClient, method: str, path: str, **arguments: Any) -> Any:
        if method != "GET":
            waits[path.rpartition("/")[2]] = arguments["timeout"].read
        return send(self, method, path, **arguments)

    monkeypatch.setattr(AdminClient, "_send", noting_send)
    loramux("adapters", "promote", "acme/support@1", "--no-warm")
    one = waits.pop("default")
    loramux("adapters", "promote", "acme/support@2", "--no-warm", "--percent", 10)
    two = waits.pop("default")
    loramux("adapters", "rollback", "acme/support", "--no-warm")
    for verb in ("preload", "pin"):
        loramux("adapters", verb, "acme/support@1")
    needed = {"one": one, "two": two, **waits}
    loads = {"one": 1, "two": 2, "rollback": MAX_TARGETS, "preload": 1, "pin": 1}
    assert needed == {name: WARM_TIMEOUT_S * num_loads + 15.0 for name, num_loads in loads.items()}
    assert MAX_VERSIONS == MAX_TARGETS

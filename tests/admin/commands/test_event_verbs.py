from __future__ import annotations

import json

import pytest

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.admin.client.client import ServerUnreachable
from loramux.admin.client.followed_events import NumberedReader
from loramux.admin.rest.adapters import events
from tests.admin.admin_side import AdminSide
from tests.admin.command_line import Run, printed_json
from tests.admin.peft_directory import MakeAdapter
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.platform.events.target import listening_target


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """End streams early, so that the module's server has no running request at the end, and commands reconnect."""
    monkeypatch.setattr(events, "LIFETIME_S", 0.05)
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr("loramux.admin.client.followed_events.PAUSE_S", 0.01)


@pytest.fixture
def adapter_id(admin_side: AdminSide) -> str:
    services = admin_side.services
    adapter = services.adapters.registry.create_adapter(services.accounts.tenants.create("acme").id, "support")
    add_ready_versions(services.database, adapter.id, 2)
    AdapterAliases(services.database).set(adapter.id, "canary", {1: 90, 2: 10})
    return adapter.id


def test_watch_prints_events_and_continues_after_a_stream_ends(loramux: Run, adapter_id: str) -> None:
    done = loramux("watch", "acme/support", "--after", 0, "--count", 2)
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first.endswith("1  alias.moved  acme/support  default -> version 1")
    assert second.endswith("2  alias.moved  acme/support  canary -> version 1 (90), version 2 (10)")
    lines = loramux("watch", "--after", 0, "--count", 2, "--type", "alias.moved", "--json").stdout.splitlines()
    assert [json.loads(line)["sequence"] for line in lines] == [1, 2]


def test_validated_and_rejected_versions_are_told(
    loramux: Run, admin_side: AdminSide, make_adapter: MakeAdapter
) -> None:
    admin_side.services.accounts.tenants.create("acme")
    push = ("--tenant", "acme", "--name", "support")
    assert loramux("adapters", "push", make_adapter(), *push).exit_code == 0
    broken = make_adapter()
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "r": -1}))
    assert loramux("adapters", "push", broken, *push).exit_code == 1
    lines = loramux("watch", "acme/support", "--after", 0, "--count", 3, "--json").stdout.splitlines()
    ready, moved, rejected = map(json.loads, lines)
    assert (ready["type"], ready["data"]["version"]) == ("version.ready", 1)
    assert len(ready["data"]["digest"]) == 64
    assert (moved["type"], moved["data"]["targets"]) == ("alias.moved", {"1": 100})
    assert (rejected["type"], rejected["data"]["version"]) == ("version.rejected", 2)
    assert rejected["data"]["error"]["message"]


def test_watch_fails_for_an_unknown_adapter_and_type(loramux: Run, adapter_id: str) -> None:
    assert "has no adapter" in loramux("watch", "acme/nobody").stderr
    assert "the types are" in loramux("watch", "--type", "x").stderr


def test_webhooks_are_created_tested_and_deleted(loramux: Run, adapter_id: str) -> None:
    with listening_target() as target:
        made = printed_json(loramux("webhooks", "create", target.url, "--tenant", "acme", "--json"))
        assert made["secret"].startswith("whsec_")
        assert "answered with 204" in loramux("webhooks", "test", made["id"]).stdout
        target.status = 500
        assert loramux("webhooks", "test", made["id"]).exit_code == 1
    assert target.url in loramux("webhooks", "list", "--tenant", "acme").stdout
    assert "is deleted" in loramux("webhooks", "delete", made["id"]).stdout


def test_events_count_once_they_are_complete() -> None:
    reader, found = NumberedReader(), []
    for piece in (b"retry: 1\r\nid: 4\r\n\r\n: hello\n", b"id: 5\nevent: x\nda", b'ta: {"n": 1}\n', b"\n"):
        found.append(list(reader.feed(piece)))
    assert found == [[(4, None), (None, None)], [], [], [(5, {"n": 1})]]


@pytest.mark.parametrize("data", [b"id: x\n", b"data: [1]\n", b"data: {\n", b"data: " + b"[" * 100_000 + b"\n"])
def test_stream_that_is_not_one_of_events_is_an_error(data: bytes) -> None:
    with pytest.raises(ServerUnreachable):
        list(NumberedReader().feed(data))

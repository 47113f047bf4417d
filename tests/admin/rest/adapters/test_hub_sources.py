"""An operator registers adapters from a hub, over REST and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from tests.adapter_store.hub.local_hub import LocalHub, running_hub
from tests.admin.command_line import Run, printed_json
from tests.admin.peft_directory import MakeAdapter
from tests.admin.rest.adapters.pushed_versions import new_adapter
from tests.admin.rest.adapters.test_operator_sources import register
from tests.admin.rest.tenants_and_keys import new_bearer

pytestmark = pytest.mark.anyio
SOURCE = "hf://acme/support@main"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def admin_sources(hub: LocalHub) -> AdapterSources:
    return AdapterSources(["hf://acme"], hub=HubClient(hub.url))


@pytest.fixture
def publish(hub: LocalHub, make_adapter: MakeAdapter) -> Callable[[], str]:
    """A function that pushes a new adapter to the hub's repository and returns the commit."""

    def publish() -> str:
        return hub.push("acme/support", {path.name: path.read_bytes() for path in make_adapter().iterdir()})

    return publish


async def test_version_is_registered_with_its_commit(
    http: httpx.AsyncClient, hub: LocalHub, publish: Callable[[], str], admin_side: Any
) -> None:
    adapter_id = await new_adapter(http)
    commit = publish()
    version = await register(http, adapter_id, SOURCE)
    assert (version["state"], version["report"]["source_commit"]) == ("ready", commit)
    for name, content in hub.commits["acme/support", commit].items():
        answer = await http.get(f"/admin/v1/adapters/{adapter_id}/versions/1/files/{name}")
        assert answer.content == content
    again = await register(http, adapter_id, SOURCE)
    assert (again["state"], again["error"]["code"]) == ("rejected", "identical_version")
    moved = publish()
    newer = await register(http, adapter_id, SOURCE)
    assert (newer["state"], newer["report"]["source_commit"]) == ("ready", moved)
    stale = await http.post(f"/admin/v1/adapters/{adapter_id}/versions", json={"source": f"{SOURCE}#{commit}"})
    assert (stale.status_code, stale.json()["error"]["code"]) == (400, "source_moved")


async def test_revision_that_moves_before_the_download_is_refused(
    http: httpx.AsyncClient, hub: LocalHub, publish: Callable[[], str], admin_side: Any
) -> None:
    adapter_id = await new_adapter(http)
    before = publish()
    # The revision moves right after the answer to the call that creates the version.
    hub.faults["/revision/"] = lambda _: hub.faults.clear() or publish()  # type: ignore[func-returns-value]
    version = await register(http, adapter_id, SOURCE)
    assert (version["state"], version["error"]["code"]) == ("rejected", "source_moved")
    assert before in version["error"]["message"]
    assert list(admin_side.blobs.list_keys()) == []
    assert not any("/resolve/" in path for path, _ in hub.requests)


async def test_hub_that_cannot_be_asked_creates_nothing(
    http: httpx.AsyncClient, hub: LocalHub, publish: Callable[[], str]
) -> None:
    adapter_id = await new_adapter(http)
    url = f"/admin/v1/adapters/{adapter_id}/versions"
    hub.faults["/revision/"] = lambda answer: setattr(answer, "status", 503)
    publish()
    down = await http.post(url, json={"source": SOURCE})
    assert (down.status_code, down.json()["error"]["code"]) == (503, "source_unavailable")
    assert int(down.headers["retry-after"]) > 0
    assert "503" in down.json()["error"]["message"]
    hub.faults.clear()
    for source, code in (
        ("hf://acme/absent@main", "source_not_found"),
        ("hf://acme/support@absent", "source_not_found"),
        ("hf://rival/support@main", "source_not_allowed"),
        ("hf://acme/support", "invalid_source"),
    ):
        refused = await http.post(url, json={"source": source})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
        assert refused.json()["error"]["param"] == "source"
    tenant = await new_bearer(http, "acme", ["tenant:admin"])
    assert (await http.post(url, json={"source": SOURCE}, headers=tenant)).status_code == 403
    assert (await http.get(url)).json()["data"] == []


async def test_download_is_retried(
    http: httpx.AsyncClient,
    hub: LocalHub,
    publish: Callable[[], str],
    admin_side: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loramux.adapter_store.ingest.version_processor.SOURCE_RETRY_S", 0.1)
    adapter_id = await new_adapter(http)
    publish()
    failures = iter(range(2))

    def fail_twice(answer: Any) -> None:
        if next(failures, None) is not None:
            answer.status = 502

    hub.faults["/store/"] = fail_twice
    version = await register(http, adapter_id, SOURCE, admin_side.services.adapters.ingest.has_pending.set)
    assert version["state"] == "ready"


def test_command_line_registers_a_source(loramux: Run, publish: Callable[[], str], tmp_path: Path) -> None:
    loramux("tenants", "create", "acme")
    commit = publish()
    push = ("--tenant", "acme", "--name", "support", "--json")
    pushed = printed_json(loramux("adapters", "push", SOURCE, *push))
    assert (pushed["model"], pushed["version"]) == ("acme/support", 1)
    assert commit in loramux("adapters", "show", "acme/support@1").stdout
    refused = loramux("adapters", "push", f"hf://acme/support@{'0' * 40}", *push)
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (1, "source_not_found")
    assert loramux("adapters", "push", SOURCE, *push, "--no-template").exit_code == 2

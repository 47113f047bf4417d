from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.push import FILE_NAMES, PushRefused, push_adapter
from loramux.admin.serving.app import create_admin_app
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.failing_calls import fail_first
from tests.admin.running_server import SharedServer


@pytest.fixture
def client(admin_url: str) -> Iterator[AdminClient]:
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        yield client


def test_push_of_archived_or_quarantined_version_is_refused(
    client: AdminClient, make_adapter: Callable[..., Path]
) -> None:
    directories = [make_adapter(), make_adapter()]
    for directory in directories:
        push_adapter(client, directory, "acme", "support")
    adapter_id = client.get("adapters", tenant="acme")["data"][0]["id"]
    for verb, state in (("archive", "archived"), ("quarantine", "quarantined")):
        client.post(f"adapters/{adapter_id}/versions/2/{verb}", {})
        with pytest.raises(PushRefused) as refused:
            push_adapter(client, directories[1], "acme", "support")
        assert refused.value.code == f"version_{state}"
    assert [version["number"] for version in client.items(f"adapters/{adapter_id}/versions")] == [2, 1]


def to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("missing"))


def to_itself(path: Path) -> None:
    path.symlink_to(path)


def to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, to_nothing, to_itself, to_a_device])
@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "parsers.json", "tokenizer.json"],
)
def test_only_regular_files_are_pushed(
    client: AdminClient, make_adapter: Callable[..., Path], name: str, make: Callable[[Path], None]
) -> None:
    directory = make_adapter()
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises(OSError, match=f"{name} is not a regular file"):
        push_adapter(client, directory, "acme", "support")
    assert not list(client.items("adapters"))


def test_linked_files_are_pushed(client: AdminClient, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for number, path in enumerate(make_adapter().iterdir()):
        (tmp_path / f"blob{number}").hardlink_to(path)
        (linked / path.name).symlink_to(Path("..") / f"blob{number}")
    assert push_adapter(client, linked, "acme", "support").version == 1


class PrefixProxy:
    """Publishes an app under `/loramux` only, with or without stripping this prefix."""

    def __init__(self, app: ASGIApp, *, strips: bool) -> None:
        self._app = app
        self._strips = strips

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith("/loramux/"):
            await Response(status_code=404)(scope, receive, send)
            return
        if self._strips:
            path = path.removeprefix("/loramux")
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)


@pytest.mark.parametrize(
    ("root_path", "strips"),
    [
        pytest.param("/loramux", True, id="prefix-is-stripped"),
        pytest.param("/loramux", False, id="prefix-is-kept"),
        pytest.param("", True, id="server-without-root-path"),
    ],
)
def test_files_are_pushed_through_a_proxy_that_adds_a_prefix(
    admin_side: AdminSide,
    shared_server: SharedServer,
    make_adapter: Callable[..., Path],
    root_path: str,
    strips: bool,
) -> None:
    shared_server.app = PrefixProxy(create_admin_app(admin_side.services, root_path), strips=strips)
    with AdminClient(f"{shared_server.url}/loramux", ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        assert push_adapter(client, make_adapter(), "acme", "support").version == 1
        [adapter] = client.items("adapters")
        uploads = f"adapters/{adapter['id']}/uploads"
        files = [{"name": name, "size": 1, "sha256": "0" * 64} for name in FILE_NAMES]
        client.post(uploads, {"files": files})
        [upload] = client.items(uploads)
        assert {file["url"].partition("/admin/v1/")[0] for file in upload["files"]} == {root_path}


class BusyServer(AdminClient):
    """Fails each file twice: first because no upload slot is free, then with a broken connection."""

    num_puts = 0

    def put_bytes(self, url: str, size: int, chunks: Iterable[bytes]) -> None:
        self.num_puts += 1
        if self.num_puts % 3 == 1:
            next(iter(chunks))
            raise AdminError(503, "this server has reached its limit of concurrent uploads", "too_many_uploads", None)
        if self.num_puts % 3 == 2:
            raise ServerUnreachable("the connection broke")
        super().put_bytes(url, size, chunks)


def test_push_retries_when_server_is_busy(
    admin_url: str, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("loramux.admin.client.push.time", clock)
    with BusyServer(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        assert push_adapter(client, make_adapter(), "acme", "support").version == 1
        assert client.num_puts == 6
    assert pauses[:4] == [0.5, 2.0, 0.5, 2.0]


def test_push_does_not_retry_refused_file(
    admin_url: str, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: AdminClient, url: str, size: int, chunks: Iterable[bytes]) -> None:
        raise AdminError(400, "the bytes have another SHA-256", "checksum_mismatch", "sha256")

    clock = SimpleNamespace(sleep=lambda _: pytest.fail("it was sent again"), monotonic=time.monotonic)
    monkeypatch.setattr(AdminClient, "put_bytes", refuse)
    monkeypatch.setattr("loramux.admin.client.push.time", clock)
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        with pytest.raises(AdminError) as refused:
            push_adapter(client, make_adapter(), "acme", "support")
    assert refused.value.code == "checksum_mismatch"


def test_push_waits_for_its_version_during_a_restart(
    admin_url: str, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ServerUnreachable("no server answers"), AdminError(502, "the server returned 502", None, None)
    fail_first(monkeypatch, AdminClient, "get", *gone, where="/versions/1")
    with AdminClient(admin_url, ADMIN_KEY) as client:
        client.post("tenants", {"slug": "acme"})
        assert push_adapter(client, make_adapter(), "acme", "support").version == 1

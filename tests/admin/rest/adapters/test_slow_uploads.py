from __future__ import annotations

import gc
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from loramux.admin.rest.adapters import uploads
from loramux.admin.rest.services import MAX_UPLOADS_EACH
from loramux.admin.server import transfer_slots
from tests.admin.admin_side import ADMIN_KEY
from tests.admin.running_server import RunningServer

SIZE = 1000


@pytest.fixture
def client(admin_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=admin_server.url, headers=headers, trust_env=False, timeout=10) as client:
        yield client


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged_errors(admin_server: RunningServer) -> Iterator[list[logging.LogRecord]]:
    """The errors that libraries log on the server's thread during the test."""
    errors = _Errors()
    errors.addFilter(lambda record: record.thread == admin_server.thread.ident)
    # What an earlier test has left behind may log an error when it is freed.
    gc.collect()
    logging.getLogger().addHandler(errors)
    yield errors.records
    logging.getLogger().removeHandler(errors)


@pytest.fixture
def file_path(client: httpx.Client) -> str:
    return file_path_of(client, "acme")


def file_path_of(client: httpx.Client, tenant: str) -> str:
    """The path for uploading a file that a new tenant has declared."""
    client.post("/admin/v1/tenants", json={"slug": tenant})
    adapter = client.post("/admin/v1/adapters", json={"tenant": tenant, "name": "support"}).json()
    files = [
        {"name": name, "size": SIZE, "sha256": "0" * 64}
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    upload = client.post(f"/admin/v1/adapters/{adapter['id']}/uploads", json={"files": files}).json()
    return str(upload["files"][0]["url"])


def begin(url: str, path: str) -> socket.socket:
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=10)
    head = f"PUT {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-length: {SIZE}\r\n\r\n"
    connection.sendall(head.encode() + b"x" * (SIZE // 2))
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition was not met in time")


def test_slow_uploads_delay_only_their_own_tenant(
    admin_server: RunningServer,
    admin_side: Any,
    client: httpx.Client,
    file_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_slots, "WAIT_S", 5)
    upload_slots = admin_side.services.slots.uploads
    with ExitStack() as stack:
        # Open more uploads than AnyIO's shared pool has threads (40).
        for _ in range(50):
            stack.enter_context(begin(admin_server.url, file_path))
        wait_until(
            lambda: (upload_slots.num_taken, upload_slots.num_waiting) == (MAX_UPLOADS_EACH, 50 - MAX_UPLOADS_EACH)
        )
        assert client.get("/admin/v1/tenants").status_code == 200
        # An upload that gets no slot in time is refused with a Retry-After header.
        put = client.put(file_path, content=b"x" * SIZE)
        assert (put.status_code, put.json()["error"]["code"]) == (429, "too_many_uploads")
        assert int(put.headers["retry-after"]) > 0
        assert upload_slots.num_taken == MAX_UPLOADS_EACH
        # Another tenant gets a slot immediately.
        put = client.put(file_path_of(client, "umbrella"), content=b"x" * SIZE)
        assert (put.status_code, put.json()["error"]["code"]) == (400, "checksum_mismatch")
    wait_until(lambda: upload_slots.num_taken == 0)
    put = client.put(file_path, content=b"x" * SIZE)
    assert (put.status_code, put.json()["error"]["code"]) == (400, "checksum_mismatch")


@pytest.mark.parametrize("limit", ["CHUNK_TIMEOUT_S", "UPLOAD_TIMEOUT_S"])
def test_slow_body_times_out(
    admin_server: RunningServer, file_path: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(uploads, limit, 0.2)
    with begin(admin_server.url, file_path) as connection:
        if limit == "UPLOAD_TIMEOUT_S":
            # Each pause is shorter than the idle timeout, but the whole upload takes too long.
            time.sleep(0.3)
            connection.sendall(b"x")
        response = HTTPResponse(connection)
        response.begin()
        answer = json.loads(response.read())
    assert (response.status, answer["error"]["code"]) == (400, "body_timeout")


def test_client_disconnect_is_not_logged_as_a_failure(
    admin_server: RunningServer,
    admin_side: Any,
    file_path: str,
    log: list[Any],
    logged_errors: list[logging.LogRecord],
) -> None:
    upload_slots = admin_side.services.slots.uploads
    with begin(admin_server.url, file_path):
        wait_until(lambda: upload_slots.num_taken == 1)
    wait_until(lambda: upload_slots.num_taken == 0)
    admin_server.stop()
    assert [entry for entry in log if entry["log_level"] == "error"] == []
    assert logged_errors == []
    assert list(admin_side.blobs.list_keys()) == []


def test_forced_stop_ends_uploads(
    admin_server: RunningServer,
    admin_side: Any,
    file_path: str,
    log: list[Any],
    logged_errors: list[logging.LogRecord],
) -> None:
    with begin(admin_server.url, file_path):
        wait_until(lambda: admin_side.services.slots.uploads.num_taken == 1)
        admin_server.stop(is_forced=True)
    assert [entry for entry in log if entry["log_level"] == "error"] == []
    assert logged_errors == []


def test_store_outage_details_appear_only_in_the_log(
    client: httpx.Client, file_path: str, admin_side: Any, log: list[Any]
) -> None:
    # Replace the store's directory with a file.
    admin_side.blobs._root.write_bytes(b"")
    declared = [
        {"name": name, "size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    upload = client.post(file_path.rsplit("/", 3)[0], json={"files": declared}).json()
    put = client.put(upload["files"][0]["url"], content=b"x")
    assert (put.status_code, put.json()["error"]["code"]) == (503, "store_unavailable")
    assert put.json()["error"]["message"] == "the adapter store cannot be reached; try again"
    assert any("cannot be written" in entry.get("error", "") for entry in log)

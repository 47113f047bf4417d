from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.admin.errors import StartRefused
from loramux.admin.server.settings import Settings, SettingsError, load_settings
from loramux.admin.serving.sharing import bind_peers
from tests.admin.serving.test_serve import ENVIRONMENT

SHARED = {"database_url": "postgresql://db/loramux", "blob_url": "s3://bucket/prefix"}


@pytest.mark.parametrize("missing", ["database_url", "blob_url"])
def test_server_that_shares_nothing_cannot_share_requests(demo_base: Path, tmp_path: Path, missing: str) -> None:
    given: dict[str, Any] = {name: value for name, value in SHARED.items() if name != missing}
    settings = Settings(model=demo_base, data_dir=tmp_path, peer_address="127.0.0.1:0", **given)
    with pytest.raises(StartRefused, match=f"set --{missing.replace('_', '-')}"):
        bind_peers(settings, "127.0.0.1:0")


def test_peer_listener_is_bound_to_its_own_address(demo_base: Path, tmp_path: Path) -> None:
    settings = Settings(model=demo_base, data_dir=tmp_path, **SHARED)  # type: ignore[arg-type]
    with bind_peers(settings, "localhost:0") as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("10.0.0.7", "is not HOST:PORT"),
        ("10.0.0.7:70000", "is not HOST:PORT"),
        ("::1:8002", "is not HOST:PORT"),
        ("a b:1", "is not HOST:PORT"),
        ("0.0.0.0:8002", "at which they can reach this one"),
        ("[::]:8002", "at which they can reach this one"),
    ],
)
def test_unusable_peer_address_is_refused(demo_base: Path, address: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(Settings, {"model": demo_base, "peer_address": address})


@pytest.mark.parametrize("address", ["10.0.0.7:8002", "[fd00::7]:8002", "loramux-0.loramux-servers:8002"])
def test_peer_address_can_be_a_name_or_an_address(demo_base: Path, address: str) -> None:
    assert load_settings(Settings, {"model": demo_base, "peer_address": address}).peer_address == address


def test_server_without_an_engine_cannot_keep_requests(demo_base: Path) -> None:
    given = {"model": demo_base, "cluster": "local", "routing": "off"}
    with pytest.raises(
        SettingsError, match="routing is invalid: a server whose engines run in a cluster has no engine"
    ):
        load_settings(Settings, given)


class Server:
    """A server on a database and a directory of blobs that it shares with others."""

    def __init__(self, model: Path, shared: Path, name: str, routing: str = "auto") -> None:
        flags = {
            "--model": model,
            "--data-dir": shared / name,
            "--database-url": f"sqlite:///{shared}/shared.db",
            "--blob-url": f"file://{shared}/blobs",
            "--port": 0,
            "--admin-port": 0,
            "--peer-address": "127.0.0.1:0",
            "--routing": routing,
        }
        arguments = [str(part) for flag in flags.items() for part in flag]
        command = [sys.executable, "-m", "loramux.admin.cli", "serve", *arguments]
        variables = {
            **ENVIRONMENT,
            "LORAMUX_ADMIN_KEY": "the operator's key of 32 characters",
            "LORAMUX_MAX_SEQUENCES": "2",
        }
        self.process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(5)]
        self.url = lines[1].split()[-1].removesuffix("/v1")
        self.admin_url = lines[2].split()[-1]
        assert lines[4].split()[0] == "peers", lines

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.admin_url}/metrics", trust_env=False, verify=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture
def servers(demo_base: Path, tmp_path: Path) -> Iterator[list[Server]]:
    running: list[Server] = []
    try:
        # The first server creates the database.
        for name in ("one", "two"):
            running.append(Server(demo_base, tmp_path, name))
        yield running
    finally:
        for server in running:
            server.process.kill()
            server.process.communicate()


@pytest.mark.campaign
def test_a_server_behind_a_picker_forwards_nothing(demo_base: Path, tmp_path: Path) -> None:
    running: list[Server] = []
    operator = {"authorization": "Bearer the operator's key of 32 characters"}
    try:
        for routing in ("off", "auto"):
            running.append(Server(demo_base, tmp_path, routing, routing))
        own, other = running
        until(lambda: all(server.metric('loramux_peers{state="connected"}') == 1 for server in running))
        with httpx.Client(trust_env=False, timeout=60) as http:
            http.post(f"{own.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
            key = http.post(f"{own.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
            headers = {"authorization": f"Bearer {key['secret']}"}

            def ask(number: int) -> httpx.Response:
                body = {"model": "base", "prompt": f"Tell {number}", "max_tokens": 16, "ignore_eos": True}
                return http.post(f"{own.url}/v1/completions", json=body, headers=headers)

            with ThreadPoolExecutor(8) as clients:
                answers = list(clients.map(ask, range(40)))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-loramux-resolved-model"] for answer in answers} == {"base"}
        assert own.metric("loramux_forwarded_sequences_total") == 0
        assert other.metric("loramux_engine_tokens_total") == 0
    finally:
        for server in running:
            server.process.kill()
            server.process.communicate()


def until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.campaign
def test_servers_share_requests_until_one_is_killed(servers: list[Server], tmp_path: Path) -> None:
    first, second = servers
    connected = 'loramux_peers{state="connected"}'
    until(lambda: all(server.metric(connected) == 1 for server in servers))
    operator = {"authorization": "Bearer the operator's key of 32 characters"}
    with httpx.Client(trust_env=False, timeout=60) as http:
        http.post(f"{first.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
        key = http.post(f"{first.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator).json()
        headers = {"authorization": f"Bearer {key['secret']}"}

        def ask(number: int, max_tokens: int = 16) -> httpx.Response:
            body = {"model": "base", "prompt": f"Tell {number}", "max_tokens": max_tokens, "ignore_eos": True}
            return http.post(f"{first.url}/v1/completions", json=body, headers=headers)

        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(ask, range(40)))
        assert {answer.status_code for answer in answers} == {200}
        forwarded = first.metric('loramux_forwarded_sequences_total{outcome="completed"}')
        assert 0 < forwarded < 40, "both engines run requests for the base"
        # The same prompt gives the same answer on either engine.
        greedy = {"model": "base", "prompt": "Hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        texts = {
            http.post(f"{server.url}/v1/completions", json=greedy, headers=headers).json()["choices"][0]["text"]
            for server in (*servers, *servers)
        }
        assert len(texts) == 1

        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait()
        with ThreadPoolExecutor(8) as clients:
            answers += clients.map(ask, range(20))
        assert {answer.status_code for answer in answers} == {200}
        until(lambda: first.metric(connected) == 0)
    used = sum(answer.json()["usage"]["completion_tokens"] for answer in answers) + 4 * 16
    until(lambda: _billed(tmp_path / "shared.db") == (used, 64))


def _billed(database: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(database)) as connection:
        row = connection.execute("SELECT sum(completion_tokens), count(*) FROM usage_events").fetchone()
    return row[0], row[1]

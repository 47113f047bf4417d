"""Engine deaths as clients see them, and a shutdown that a hung engine cannot block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.migrations.database import Database
from loramux.platform.ledger.events import Ledger, UsageEvent

ADMIN_KEY = "the operator's key of these tests"
DRAIN_S = 0.5
PATIENCE_S = 60
NUM_PROMPTS = 32
"""Number of prompts of a request that must not end before the engine is stopped."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the engine in /proc")


class Server:
    def __init__(self, model: Path, data_dir: Path) -> None:
        own = {
            "PYTHONPATH": ".src",
            "LORAMUX_ADMIN_KEY": ADMIN_KEY,
            "LORAMUX_NUM_THREADS": "1",
            "LORAMUX_MAX_SEQUENCES": "1",
            "LORAMUX_POOL_BYTES": str(16 << 20),
            "LORAMUX_DRAIN_S": str(DRAIN_S),
        }
        self._data_dir = data_dir
        arguments = ["--model", str(model), "--data-dir", str(data_dir), "--port", "0", "--admin-port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loramux.admin.cli", "serve", *arguments],
            env={**{name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        self.url = lines[1].split()[-1].removesuffix("/v1")
        self.admin_url = lines[2].split()[-1]
        self.http = httpx.Client(trust_env=False, timeout=PATIENCE_S)

    def make_key(self) -> None:
        operator = {"authorization": f"Bearer {ADMIN_KEY}"}
        self.http.post(f"{self.admin_url}/admin/v1/tenants", json={"slug": "acme"}, headers=operator)
        made = self.http.post(f"{self.admin_url}/admin/v1/api_keys", json={"tenant": "acme"}, headers=operator)
        self.http.headers["authorization"] = f"Bearer {made.json()['secret']}"

    def engine_pid(self) -> int:
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            try:
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                command = (directory / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == self.process.pid and b"loramux.engine.server.process" in command:
                return int(directory.name)
        raise AssertionError("there is no engine")

    def published_addresses(self) -> list[str]:
        operator = {"authorization": f"Bearer {ADMIN_KEY}"}
        (base,) = self.http.get(f"{self.admin_url}/admin/v1/bases", headers=operator).json()["data"]
        return [one["address"] for one in base["servers"]]

    def num_requests(self) -> int:
        """Number of requests in flight."""
        operator = {"authorization": f"Bearer {ADMIN_KEY}"}
        return len(self.http.get(f"{self.admin_url}/admin/v1/requests", headers=operator).json()["data"])

    def ask(self, *prompts: str) -> Any:
        """The call takes seconds, because its prompts run one after another."""
        body = {"model": "base", "prompt": prompts, "max_tokens": 900, "ignore_eos": True, "stream": True}
        return self.http.stream("POST", f"{self.url}/v1/completions", json=body)

    def health(self, url: str, kind: str = "ready") -> httpx.Response:
        return self.http.get(f"{url}/health/{kind}")

    def usage(self) -> list[UsageEvent]:
        database = Database(f"sqlite:///{self._data_dir / 'loramux.db'}")
        events = list(Ledger(database).events(None, limit=10).data)[::-1]
        database.close()
        return events


@pytest.fixture
def server(demo_base: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(demo_base, tmp_path / "data")
    server.make_key()
    yield server
    server.http.close()
    if server.process.poll() is None:
        server.process.kill()
    server.process.communicate()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def events(lines: Iterator[str]) -> list[Any]:
    return [line.removeprefix("data: ") for line in lines if line]


def test_engine_death_restart_and_drain_with_a_hung_engine(server: Server) -> None:
    # The server publishes the port that the system chose, not port 0.
    until(lambda: [port_of(address) for address in server.published_addresses()] == [port_of(server.url)])

    first = server.engine_pid()
    with ThreadPoolExecutor(1) as pool, server.ask(*["Hello"] * NUM_PROMPTS) as response:
        lines = response.iter_lines()
        next(lines)

        def wait_in_line() -> httpx.Response:
            with server.ask("Good morning") as waiting:
                waiting.read()
            return waiting

        waits = pool.submit(wait_in_line)
        # It waits until all prompts of the first request have run, one after another.
        until(lambda: server.num_requests() == 2)
        os.kill(first, signal.SIGKILL)
        received = events(lines)
        waited = waits.result()
    # The running request ends with an error event. The waiting request is told to retry.
    assert json.loads(received[-1])["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in received
    assert (waited.status_code, waited.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(waited.headers["retry-after"]) >= 1

    # The server is not ready and reports why on the admin listener. It stays live and becomes ready again.
    red, why = server.health(server.url), server.health(server.admin_url)
    assert (red.status_code, red.json()["engine"], "reason" in red.json()) == (503, False, False)
    assert why.status_code == 503
    assert why.json()["reason"].startswith("killed by SIGKILL")
    assert server.health(server.url, "live").status_code == 200
    until(lambda: server.health(server.url).status_code == 200)
    assert "reason" not in server.health(server.admin_url).json()

    second = server.engine_pid()
    assert second != first
    with server.ask(*["Hello again"] * NUM_PROMPTS) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(second, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        received = events(lines)
        _, errors = server.process.communicate(timeout=PATIENCE_S)
        took_s = time.monotonic() - started
    assert server.process.returncode == 0, errors
    assert "Traceback" not in errors
    assert json.loads(received[-1])["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in received
    # Allow for the drain, the engine's grace period, the last events and a busy machine. The step timeout alone is a
    # minute.
    assert took_s < 45
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)

    ran, never_ran, hung = sorted(server.usage(), key=lambda event: event.request_id)
    assert [event.status for event in (ran, never_ran, hung)] == ["failed"] * 3
    assert (never_ran.prompt_tokens, never_ran.completion_tokens) == (0, 0)
    # Before the engine was stopped, some of a request's prompts may have ended.
    for event in (ran, hung):
        assert event.prompt_tokens > 0
        assert 0 < event.completion_tokens < NUM_PROMPTS * 900

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.migrations.database import Database
from loramux.platform.ledger.events import Ledger

ADMIN_KEY = "the operator's key of these tests"


def start(*arguments: object) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    own = {"PYTHONPATH": ".src", "LORAMUX_ADMIN_KEY": ADMIN_KEY, "LORAMUX_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "loramux.admin.cli", *map(str, arguments)],
        env={**inherited, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def words(process: subprocess.Popen[str], num_lines: int) -> list[list[str]]:
    """Read the lines that a server prints when it starts listening, and split them into words."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(num_lines)]
    assert all(lines), process.communicate()[1]
    return [line.split() for line in lines]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in reversed(started):
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(url: str, key: str, max_tokens: int) -> Any:
    body = {"model": "base", "prompt": [5], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(trust_env=False, timeout=60) as http:
        answer = http.post(f"{url}/v1/completions", json=body, headers=headers)
    return answer.status_code, answer.text


@pytest.mark.campaign
def test_two_gateways_share_an_engine_a_database_and_a_limit(
    processes: list[subprocess.Popen[str]], demo_base: Path, tmp_path: Path
) -> None:
    ports = ("--port", 0, "--admin-port", 0)
    served = start("serve", "--model", demo_base, "--data-dir", tmp_path / "data", *ports)
    processes.append(served)
    _, openai, admin, _, engine = words(served, 5)
    server_url, admin_url = openai[-1].removesuffix("/v1"), admin[-1]
    assert engine[1] == str(tmp_path / "data" / "run" / "engine.sock")

    url = f"sqlite:///{tmp_path / 'data' / 'loramux.db'}"
    joining = ("--model", demo_base, "--engine", engine[1], "--database-url", url)
    gateway = start("gateway", *joining, "--data-dir", tmp_path / "second", *ports)
    processes.append(gateway)
    (tmp_path / "empty.db").touch()
    # While that gateway starts, check that gateways with an invalid setup exit with a message.
    refusals = {
        "there is no engine": start(
            "gateway", "--model", demo_base, "--engine", "/none", "--database-url", url, *ports
        ),
        "needs its server's database": start("gateway", "--model", demo_base, "--engine", engine[1], *ports),
        "set --engine": start("gateway", "--model", demo_base, "--database-url", url, *ports),
        "run 'loramux db upgrade'": start(
            *("gateway", "--model", demo_base, "--engine", engine[1], *ports),
            *("--data-dir", tmp_path / "third", "--database-url", f"sqlite:///{tmp_path / 'empty.db'}"),
        ),
    }
    processes.extend(refusals.values())
    said, openai, metrics = words(gateway, 3)
    gateway_url, metrics_url = openai[-1].removesuffix("/v1"), metrics[-1]
    assert said[:4] == ["loramux", "gateway", "serves", "base"]

    with httpx.Client(trust_env=False, timeout=30, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as http:
        http.post(f"{admin_url}/admin/v1/tenants", json={"slug": "acme"})
        key = http.post(f"{admin_url}/admin/v1/api_keys", json={"tenant": "acme"}).json()["secret"]
        assert http.get(f"{gateway_url}/health/ready").status_code == 200
        assert "loramux_running_requests" in http.get(f"{metrics_url}/metrics").text
        assert http.get(f"{metrics_url}/admin/v1/tenants").status_code == 404
        loading = http.post(f"{gateway_url}/v1/load_lora_adapter", json={}, headers={"authorization": f"Bearer {key}"})
        assert loading.json()["error"]["code"] == "not_on_this_gateway"
        assert ask(server_url, key, 5)[0] == ask(gateway_url, key, 5)[0] == 200

        # Each request reserves 21 tokens, and the burst is 210 tokens with almost no refill, so 10 of 40 requests
        # succeed.
        policy = {"tenant": "acme", "metric": "tokens_per_minute", "limit": 1, "burst": 210}
        made = http.post(f"{admin_url}/admin/v1/quotas", json=policy)
        assert made.status_code < 300, made.text
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda i: ask((server_url, gateway_url)[i % 2], key, 20), range(40)))
        statuses = [status for status, _ in answers]
        assert statuses.count(200) == 10
        assert statuses.count(429) == 30

        # The gateway drains: a running stream completes after SIGTERM.
        http.delete(f"{admin_url}/admin/v1/quotas/{made.json()['id']}")
        body = {"model": "base", "prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {key}"}
        with http.stream("POST", f"{gateway_url}/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            gateway.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        _, errors = gateway.communicate(timeout=30)
        assert (gateway.returncode, "Traceback" in errors) == (0, False), errors
        # The engine belongs to its server and keeps running.
        assert http.get(f"{server_url}/health/ready").status_code == 200

    for sentence, refused in refusals.items():
        _, errors = refused.communicate(timeout=60)
        assert (refused.returncode, "Traceback" in errors) == (2, False), errors
        assert sentence in errors

    database = Database(url)
    usage = Ledger(database).events(None, limit=50).data
    database.close()
    assert sum(event.completion_tokens for event in usage) == 2 * 5 + 10 * 20 + 200

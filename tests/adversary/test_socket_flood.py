"""A polite tenant's time to first token beside attacks on the sockets of a running server."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adversary.socket_flood import KINDS
from tests.conformance.served import Deployment, deployment

pytestmark = pytest.mark.campaign

BASE = Path(__file__).parents[2] / "admin" / "demo" / "base"
NUM_CONNECTIONS = int(os.environ.get("LORAMUX_SOCKETS", "1000"))
SECONDS = float(os.environ.get("LORAMUX_SOCKETS_S", "20"))
MAX_RATIO = float(os.environ.get("LORAMUX_SOCKETS_RATIO", "1.25"))


def key_of(made: Deployment, tenant: str) -> str:
    made.json("tenants", "create", tenant)
    return str(made.json("keys", "create", "--tenant", tenant)["secret"])


@contextmanager
def attacks(made: Deployment, kinds: tuple[str, ...], key: str, counts: list[Any]) -> Iterator[None]:
    """Attackers in processes of their own, for as long as polite requests are timed."""
    each = NUM_CONNECTIONS // max(1, len(kinds))
    arguments = ["--connections", str(each), "--hold", str(SECONDS + 2), "--key", key]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.socket_flood", "127.0.0.1", str(made.port), kind, *arguments],
            env=made.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    ]
    try:
        # They start and connect meanwhile.
        time.sleep(2 if kinds else 0)
        yield
        counts += [json.loads(process.communicate(timeout=SECONDS + 60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def first_token_seconds(made: Deployment, key: str) -> list[float]:
    """Of requests one after another, each on a new connection; none may fail."""
    found = []
    until = time.monotonic() + SECONDS
    body = {"model": "demo-base", "prompt": "Once upon a time", "max_tokens": 4, "stream": True}
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    with httpx.Client(base_url=f"http://127.0.0.1:{made.port}", headers=headers, timeout=30, trust_env=False) as http:
        while time.monotonic() < until:
            began_s = time.perf_counter()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        found.append(time.perf_counter() - began_s)
                        break
    return found


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def test_a_polite_tenant_notices_no_attack_on_sockets(tmp_path: Path) -> None:
    made = deployment(BASE, tmp_path / "data", (), {"LORAMUX_NUM_THREADS": "1"})
    rows, slow = [], []
    with made.running():
        polite, hostile = key_of(made, "polite"), key_of(made, "hostile")
        first_token_seconds(made, polite)
        for kinds in (*((kind,) for kind in KINDS), KINDS):
            calm = first_token_seconds(made, polite)
            counts: list[Any] = []
            with attacks(made, kinds, hostile, counts):
                attacked = first_token_seconds(made, polite)
            calm += first_token_seconds(made, polite)
            ratio = p99(attacked) / p99(calm)
            rows.append(
                f"{' + '.join(kinds):45} {len(attacked):5} requests  p50 {statistics.median(calm) * 1000:6.1f} ->"
                f" {statistics.median(attacked) * 1000:6.1f} ms  p99 {p99(calm) * 1000:6.1f} ->"
                f" {p99(attacked) * 1000:6.1f} ms  ratio {ratio:.2f}  {counts}"
            )
            print(f"\n{rows[-1]}", end="")
            if ratio > MAX_RATIO:
                slow.append(rows[-1])
        scraped = httpx.get(f"http://127.0.0.1:{made.admin_port}/metrics").text
    print("\n" + "\n".join(line for line in scraped.splitlines() if line.startswith("loramux_network_refusals_total")))
    assert 'loramux_requests_total{endpoint="completions",status="5' not in scraped
    assert slow == []

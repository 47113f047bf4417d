from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from loramux.adapter_store.tiers.staging_client import RESTART_S
from tests.adapter_store.waiting import wait_until
from tests.conformance.served import deployment

pytestmark = pytest.mark.campaign

DEMO = Path(__file__).parents[2] / "admin" / "demo"
NAMES = ("pirate", "formal", "json")


@dataclass(frozen=True, slots=True)
class Served:
    http: httpx.Client
    server: int
    engine: int
    right: dict[str, list[float]]
    """The answer of each adapter before anything happened."""

    def staging(self) -> int:
        return child_of(self.engine, b"loramux.adapter_store.tiers.staging_process")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    environment = {
        # Only the pool keeps adapters, and it has one slot, so each request's adapter has to be staged.
        "LORAMUX_HOST_TIER_BYTES": "0",
        "LORAMUX_MAX_RESIDENT_ADAPTERS": "1",
    }
    made = deployment(DEMO / "base", tmp_path / "data", (), environment)
    with made.running() as server:
        made.json("tenants", "create", "acme")
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        for name in NAMES:
            made.json("adapters", "push", str(DEMO / "adapters" / name), "--tenant", "acme", "--name", name)
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{made.port}", headers=headers, timeout=30, trust_env=False
        ) as http:
            right = {name: logprobs(http, name) for name in NAMES}
            assert len({tuple(one) for one in right.values()}) == len(NAMES)
            yield Served(http, server.pid, child_of(server.pid, b"loramux.engine.server.process"), right)


def test_adapters_come_although_the_staging_process_dies_and_it_ends_with_its_engine(served: Served) -> None:
    staging = set()
    for name in NAMES[:2]:
        time.sleep(RESTART_S)
        dead = served.staging()
        staging.add(dead)
        os.kill(dead, signal.SIGKILL)
        for other in (name, *NAMES):
            assert logprobs(served.http, other) == pytest.approx(served.right[other], abs=1e-6)
    assert len(staging) == 2
    assert child_of(served.server, b"loramux.engine.server.process") == served.engine
    last = served.staging()
    os.kill(served.engine, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{last}").exists())


def test_base_requests_do_not_wait_for_a_staging_process_that_hangs(served: Served) -> None:
    stopped = served.staging()
    os.kill(stopped, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(logprobs, served.http, NAMES[0])
        for _ in range(10):
            logprobs(served.http, "demo-base")
        assert not cold.done(), "base requests do not wait for adapters"
        assert cold.result() == pytest.approx(served.right[NAMES[0]], abs=1e-6)
    assert not Path(f"/proc/{stopped}").exists()
    assert child_of(served.server, b"loramux.engine.server.process") == served.engine


def logprobs(http: httpx.Client, name: str) -> list[float]:
    body = {"model": name, "prompt": "The ship", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def child_of(pid: int, program: bytes) -> int:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    (found,) = (one for one in children if program in Path(f"/proc/{one}/cmdline").read_bytes())
    return found

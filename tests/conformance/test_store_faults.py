from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from loramux.adapter_store.blobs.s3_limits import S3Limits
from tests.adapter_store.blobs.fault_proxy import FaultProxy, SeededPlan, no_faults
from tests.conformance.demo_adapters import DEMO, changed_adapter
from tests.conformance.served import deployment
from tests.reliability.record import recorded

NUM_RESIDENT, NUM_COLD, NUM_COLD_CLIENTS, NUM_SLOTS = 2, 12, 6, 10
NUM_FAULTS = int(os.environ.get("LORAMUX_STORE_FAULTS", "200"))
# A load reads the packed file once and the canonical file twice, and writes the packed file. Then the request runs.
DEADLINE_S = 4 * S3Limits().body_s + 10
BUCKET = "loramux-faults"


@dataclass
class Seen:
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    s3 = ThreadedMotoServer(port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    made = FaultProxy(f"http://{host}:{port}", hang_s=6.0)
    yield made
    made.stop()
    s3.stop()


@pytest.mark.campaign
@pytest.mark.timeout(600 + 4 * NUM_FAULTS)
def test_resident_adapters_are_served_and_cold_ones_are_right_or_refused(proxy: FaultProxy, tmp_path: Path) -> None:
    environment = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Only the pool keeps adapters, and it has few slots, so cold adapters stay cold.
        "LORAMUX_DISK_TIER_BYTES": "0",
        "LORAMUX_HOST_TIER_BYTES": "0",
        "LORAMUX_MAX_RESIDENT_ADAPTERS": str(NUM_SLOTS),
    }
    boto3.client(
        "s3",
        endpoint_url=proxy.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    ).create_bucket(Bucket=BUCKET)
    made = deployment(DEMO / "base", tmp_path / "data", ("--blob-url", f"s3://{BUCKET}/p"), environment)
    with made.running():
        made.json("tenants", "create", "acme")
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        names = [f"adapter-{number}" for number in range(NUM_RESIDENT + NUM_COLD)]
        for number, name in enumerate(names):
            directory = changed_adapter(tmp_path / name, 1 + number / 50)
            made.json("adapters", "push", str(directory), "--tenant", "acme", "--name", name)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{made.port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=DEADLINE_S + 60,
            limits=httpx.Limits(max_connections=20),
        ) as client:
            right = {name: logprobs(ask(client, name)) for name in names}
            assert len({tuple(one) for one in right.values()}) == len(names), "every adapter's answer is different"
            resident, cold = suffer(client, proxy, names, right)
            print({fault.name: number for fault, number in proxy.num_injected.items()}, resident, cold)
            proxy.plan = no_faults
            # The circuit breaker may stay open for a while.
            until = time.monotonic() + 60
            for name in names:
                while (answer := ask(client, name)).status_code == 503 and time.monotonic() < until:
                    time.sleep(1)
                assert logprobs(answer) == pytest.approx(right[name], abs=1e-6), "no damage remains"
    injected = {fault.name: number for fault, number in proxy.num_injected.items() if number}
    with recorded(
        "store-faults",
        faults=sum(injected.values()),
        kinds=len(injected),
        wrong=len(resident.wrong) + len(cold.wrong),
        resident_share=resident.outcomes["200"] / resident.outcomes.total(),
    ):
        assert resident.wrong == []
        assert cold.wrong == []
        assert set(resident.outcomes) == {"200"}
    assert set(cold.outcomes) <= {"200", "503 adapter_unavailable", "503 overloaded"}
    assert cold.outcomes["200"] > 0
    assert cold.outcomes["503 adapter_unavailable"] > 0
    assert cold.slowest_s < DEADLINE_S


def suffer(
    client: httpx.Client, proxy: FaultProxy, names: list[str], right: dict[str, list[float]]
) -> tuple[Seen, Seen]:
    """Request every adapter while the store fails, until enough faults have been injected."""
    resident, cold = Seen(), Seen()
    is_over = threading.Event()
    lock = threading.Lock()

    def keep_asking(mine: list[str], seen: Seen, pause_s: float) -> None:
        while not is_over.is_set():
            for name in mine:
                begin = time.monotonic()
                answer = ask(client, name)
                took_s = time.monotonic() - begin
                with lock:
                    seen.slowest_s = max(seen.slowest_s, took_s)
                    judge(answer, right[name], seen)
                if is_over.wait(pause_s):
                    break

    def keep_streaming(name: str) -> None:
        """Keep the adapter in use, so that it is not evicted."""
        body = {"model": name, "prompt": "The ship", "max_tokens": 100, "ignore_eos": True, "stream": True}
        while not is_over.is_set():
            with client.stream("POST", "/v1/completions", json=body) as answer:
                text = answer.read().decode()
            with lock:
                resident.outcomes[str(answer.status_code)] += 1
                if not text.endswith("data: [DONE]\n\n"):
                    resident.wrong.append("a stream that broke off")

    first_cold = NUM_RESIDENT
    asked = [(names[:first_cold], resident, 0.05)]
    asked += [(names[first_cold + number :: NUM_COLD_CLIENTS], cold, 0.0) for number in range(NUM_COLD_CLIENTS)]
    for name in names[:first_cold]:
        assert ask(client, name).status_code == 200
    threads = [threading.Thread(target=keep_asking, args=one) for one in asked]
    threads += [threading.Thread(target=keep_streaming, args=(name,)) for name in names[:first_cold]]
    proxy.plan = SeededPlan(3, rate=0.5)
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60 + 4 * NUM_FAULTS
    while sum(proxy.num_injected.values()) < NUM_FAULTS and time.monotonic() < until:
        time.sleep(0.2)
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S + 60)
    assert sum(proxy.num_injected.values()) >= NUM_FAULTS
    return resident, cold


def judge(answer: httpx.Response, right: list[float], seen: Seen) -> None:
    if answer.status_code == 200:
        seen.outcomes["200"] += 1
        if logprobs(answer) != pytest.approx(right, abs=1e-6):
            seen.wrong.append("another adapter's answer")
        return
    seen.outcomes[f"{answer.status_code} {answer.json()['error']['code']}"] += 1
    with suppress(ValueError):
        if int(answer.headers.get("retry-after", "none")) >= 1:
            return
    seen.wrong.append(f"{answer.status_code} without Retry-After")


def ask(client: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "The ship", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    return client.post("/v1/completions", json=body)


def logprobs(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.blobs.circuit_breaker import CircuitBreaker
from loramux.adapter_store.blobs.interface import canonical_key, packed_key
from loramux.adapter_store.blobs.retry_budget import RetryBudget
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.errors import AdapterCorrupt, AdapterUnavailable
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.tiers.packed_source import PackedSource
from tests.adapter_store.blobs.fault_proxy import Fault, FaultProxy, SeededPlan, no_faults
from tests.adapter_store.blobs.limits import HURRIED
from tests.adapter_store.stored_adapter import StoredAdapter
from tests.adapter_store.tiers.open_source import fetch, open_source

NUM_ON_DISK, NUM_COLD, NUM_THREADS = 3, 8, 6
# A load reads the packed file once and the canonical file twice, and replaces the packed file.
DEADLINE_S = 4 * HURRIED.body_s + HURRIED.call_s
MARGIN_S = 10.0
"""Extra time allowed for a busy machine, in seconds."""
ON_DISK_S = 0.5
"""Time limit for nine of ten reads of a small file, in seconds. Most of it allows for thread scheduling."""


class NotedStore:
    """A blob store that notes which of its methods are used."""

    def __init__(self, blobs: S3BlobStore) -> None:
        self._blobs = blobs
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.used.append(name)
        return getattr(self._blobs, name)


@pytest.mark.parametrize(
    ("num_faults", "seed"), [(40, 1), pytest.param(1000, 2, marks=pytest.mark.campaign)], ids=["40", "1000"]
)
@pytest.mark.timeout(900)
def test_store_faults_serve_no_wrong_byte_and_do_not_delay_the_disk(
    fault_proxy: FaultProxy,
    s3_bucket: str,
    target: PackTarget,
    tmp_path: Path,
    store_adapter: Any,
    record_property: Any,
    num_faults: int,
    seed: int,
) -> None:
    blobs = S3BlobStore(
        s3_bucket,
        "p",
        HURRIED,
        # Let the circuit breaker, which has its own tests, tolerate many faults and close again quickly.
        CircuitBreaker(first_open_s=0.02, max_open_s=0.1),
        RetryBudget(capacity=50, refill_per_s=50),
    )
    on_disk = [store_adapter(blobs, is_packed=True, seed=number) for number in range(NUM_ON_DISK)]
    cold = [store_adapter(blobs, is_packed=number % 2 == 0, seed=100 + number) for number in range(NUM_COLD)]
    # Without disk space for cold adapters, each fetch reads from the blob store.
    without_disk = open_source(blobs, target, tmp_path / "cold", disk_bytes=0)
    noted: Any = NotedStore(blobs)
    with_disk = open_source(noted, target, tmp_path / "warm")
    for adapter in on_disk:
        fetch(with_disk, adapter.digest)
    noted.used.clear()
    fault_proxy.hang_s = HURRIED.read_s * 2
    fault_proxy.drip_s = 0.01
    fault_proxy.plan = SeededPlan(seed, rate=0.4)

    is_over = threading.Event()
    outcomes: Counter[str] = Counter()
    times_s: dict[str, list[float]] = {"on disk": [], "cold": []}
    trouble: list[str] = []

    def ask(kind: str, source: PackedSource, adapter: StoredAdapter, limit_s: float = math.inf) -> None:
        begin = time.monotonic()
        try:
            found = fetch(source, adapter.digest)
            is_right = np.array_equal(found.payload, adapter.packed.payload)
            is_right &= np.array_equal(found.scales, adapter.packed.scales)
            outcome = "served" if is_right else "WRONG"
        except (AdapterUnavailable, AdapterCorrupt) as error:
            outcome = type(error).__name__
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - begin
        outcomes[f"{kind} {outcome}"] += 1
        times_s[kind].append(took_s)
        if took_s > limit_s or outcome not in ("served", "AdapterUnavailable", "AdapterCorrupt"):
            trouble.append(f"{kind}: {outcome} after {took_s:.2f} s")
        if kind == "on disk" and outcome != "served":
            trouble.append(f"an adapter on the disk was not served: {outcome}")

    def ask_cold(number: int) -> None:
        chooser = random.Random(seed + number)
        while not is_over.is_set():
            ask("cold", without_disk, chooser.choice(cold), DEADLINE_S + MARGIN_S)

    def ask_disk() -> None:
        while not is_over.wait(0.002):
            ask("on disk", with_disk, random.choice(on_disk))

    threads = [threading.Thread(target=ask_cold, args=(number,)) for number in range(NUM_THREADS)]
    threads.append(threading.Thread(target=ask_disk))
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    while sum(fault_proxy.num_injected.values()) < num_faults and not trouble and time.monotonic() - begin < 600:
        time.sleep(0.02)
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S + 10)
    faults = dict(sorted((fault.name, number) for fault, number in fault_proxy.num_injected.items()))
    record_property("faults", faults)
    slowest_s = {kind: max(times) for kind, times in times_s.items()}
    print(f"{time.monotonic() - begin:.1f} s", faults, dict(outcomes), slowest_s)
    assert trouble == []
    assert noted.used == [], "an adapter on the disk does not need the store"
    assert np.quantile(times_s["on disk"], 0.9) < ON_DISK_S
    assert sum(faults.values()) >= num_faults
    assert outcomes["cold served"] > 0
    assert outcomes["cold AdapterUnavailable"] > 0
    if num_faults >= 1000:
        assert len(faults) == len(Fault), "every kind of fault occurred"

    fault_proxy.plan = no_faults
    time.sleep(0.2)
    for adapter in cold:
        found = fetch(without_disk, adapter.digest)
        assert np.array_equal(found.payload, adapter.packed.payload), "no damage remains"


def test_packed_blob_damaged_in_the_store_is_rebuilt(
    s3_bucket: str, raw_bucket: Any, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    blobs = S3BlobStore(s3_bucket, limits=HURRIED)
    stored = store_adapter(blobs, is_packed=True)
    packed = raw_bucket.Object(packed_key(stored.digest, target.pack_key))
    answer = packed.get()
    right = answer["Body"].read()
    packed.put(Body=right[:-1] + bytes([right[-1] ^ 1]), Metadata=answer["Metadata"])
    found = fetch(open_source(blobs, target, tmp_path), stored.digest)
    assert np.array_equal(found.payload, stored.packed.payload)
    assert packed.get()["Body"].read() == right


def test_canonical_blob_damaged_in_the_store_is_not_served(
    s3_bucket: str, raw_bucket: Any, target: PackTarget, tmp_path: Path, store_adapter: Any
) -> None:
    blobs = S3BlobStore(s3_bucket, limits=HURRIED)
    stored = store_adapter(blobs)
    canonical = raw_bucket.Object(canonical_key(stored.digest))
    answer = canonical.get()
    right = answer["Body"].read()
    canonical.put(Body=right[:-1] + bytes([right[-1] ^ 1]), Metadata=answer["Metadata"])
    with pytest.raises((AdapterUnavailable, AdapterCorrupt)):
        fetch(open_source(blobs, target, tmp_path), stored.digest)
    assert blobs.exists(canonical_key(stored.digest)), "a file that cannot be rebuilt is kept for inspection"

"""Who waits for an adapter can leave, and nobody else notices; what nobody wants is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import AdapterUnavailable, LoadCancelled
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.tiers.disk_tier import DiskTier, HeldFile
from loramux.adapter_store.tiers.leases import Lease
from loramux.adapter_store.tiers.tiered_store import TieredStore
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore

PLENTY = 1 << 30


class Bench:
    """A store over blobs that can be held up, and callers on threads."""

    def __init__(self, target: PackTarget, directory: Path, store_adapter: Any, pool: ThreadPoolExecutor) -> None:
        self.blobs = WatchedBlobStore()
        self._target = target
        self._directory = directory / "disk"
        self._store_adapter = store_adapter
        self._pool = pool
        self.store = self.reopen()

    def reopen(self, host_bytes: int = PLENTY, disk_bytes: int = PLENTY) -> TieredStore:
        return TieredStore(self.blobs, self._target, self._directory, disk_bytes, host_bytes)

    def adapter(self, seed: int = 0, is_packed: bool = True) -> Any:
        return self._store_adapter(self.blobs, seed=seed, is_packed=is_packed)

    def hold_up(self) -> None:
        self.blobs.asked.clear()
        self.blobs.may_answer.clear()

    def lease_elsewhere(self, digest: str, **options: Any) -> Future[Lease]:
        return self._pool.submit(self.store.lease, digest, **options)

    def files(self) -> list[str]:
        return [path.stem for path in self._directory.glob("*/*.packed")]


@pytest.fixture
def bench(target: PackTarget, tmp_path: Path, store_adapter: Any) -> Iterator[Bench]:
    with ThreadPoolExecutor(8) as pool:
        bench = Bench(target, tmp_path, store_adapter, pool)
        yield bench
        bench.blobs.may_answer.set()


def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def num_given_up(store: TieredStore) -> int:
    return store.figures.snapshot().num_given_up


def test_who_leaves_at_a_deadline_disturbs_nobody(bench: Bench) -> None:
    stored = bench.adapter()
    bench.hold_up()
    patient = bench.lease_elsewhere(stored.digest)
    assert bench.blobs.asked.wait(10)
    begun_s = time.monotonic()
    with pytest.raises(AdapterUnavailable, match=r"not loaded within 0\.05 s"):
        bench.store.lease(stored.digest, deadline_s=0.05)
    assert time.monotonic() - begun_s < 5
    assert not patient.done()
    bench.blobs.may_answer.set()
    with patient.result(10) as lease:
        np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)
    assert bench.blobs.num_gets == {"packed": 1}
    assert num_given_up(bench.store) == 0


def test_the_first_who_asked_may_leave_as_well(bench: Bench) -> None:
    stored = bench.adapter()
    bench.hold_up()
    cancellation = Cancellation()
    first = bench.lease_elsewhere(stored.digest, cancel=cancellation)
    assert bench.blobs.asked.wait(10)
    second = bench.lease_elsewhere(stored.digest)
    until(lambda: sum(len(load.waiters) for load in bench.store._loads.values()) == 2)
    cancellation.cancel()
    with pytest.raises(LoadCancelled):
        first.result(10)
    bench.blobs.may_answer.set()
    second.result(10).release()
    assert bench.blobs.num_gets == {"packed": 1}


def test_what_all_have_left_goes_to_the_disk_and_not_to_memory(bench: Bench) -> None:
    stored = bench.adapter()
    bench.hold_up()
    cancellation = Cancellation()
    waiting = [bench.lease_elsewhere(stored.digest, cancel=cancellation) for _ in range(3)]
    assert bench.blobs.asked.wait(10)
    cancellation.cancel()
    for one in waiting:
        with pytest.raises(LoadCancelled):
            one.result(10)
    bench.blobs.may_answer.set()
    until(lambda: num_given_up(bench.store) == 1)
    assert bench.store.host_used_bytes == 0
    assert bench.files() == [stored.digest]
    # It was not looked at before it came there: it is now.
    with bench.store.lease(stored.digest) as lease:
        np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)
    assert bench.blobs.num_gets == {"packed": 1}


def test_wrong_bytes_of_a_load_that_was_given_up_are_not_served_later(bench: Bench, target: PackTarget) -> None:
    stored = bench.adapter()
    bench.blobs.damage(f"packed/{stored.digest}/{target.pack_key}")
    bench.hold_up()
    with pytest.raises(AdapterUnavailable):
        bench.store.lease(stored.digest, deadline_s=0.01)
    bench.blobs.may_answer.set()
    until(lambda: num_given_up(bench.store) == 1)
    with bench.store.lease(stored.digest) as lease:
        np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)
    assert bench.store.figures.snapshot().num_set_aside == 2, "from the disk, and then from the blob store"


def test_an_adapter_that_is_to_be_packed_is_not_packed_for_nobody(bench: Bench) -> None:
    stored = bench.adapter(is_packed=False)
    bench.hold_up()
    with pytest.raises(AdapterUnavailable):
        bench.store.lease(stored.digest, deadline_s=0.01)
    bench.blobs.may_answer.set()
    until(lambda: num_given_up(bench.store) == 1)
    assert bench.files() == []
    assert bench.blobs.num_gets == {"packed": 1}, "the canonical file is not even asked for"


def test_who_comes_before_a_load_is_given_up_joins_it(bench: Bench) -> None:
    stored = bench.adapter()
    bench.hold_up()
    with pytest.raises(AdapterUnavailable):
        bench.store.lease(stored.digest, deadline_s=0.01)
    later = bench.lease_elsewhere(stored.digest)
    until(lambda: any(load.waiters for load in bench.store._loads.values()))
    bench.blobs.may_answer.set()
    later.result(10).release()
    assert bench.blobs.num_gets == {"packed": 1}
    assert num_given_up(bench.store) == 0


def test_a_lease_that_was_cancelled_before_loads_nothing(bench: Bench) -> None:
    stored = bench.adapter()
    bench.hold_up()
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(LoadCancelled):
        bench.store.lease(stored.digest, cancel=cancellation)
    assert not bench.blobs.num_gets
    assert not bench.store._loads
    assert bench.store.host_used_bytes == 0


def test_who_waits_for_another_that_reads_the_disk_may_leave(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = bench.adapter()
    bench.store.lease(stored.digest).release()
    bench.store = bench.reopen()
    reads, may_read = threading.Event(), threading.Event()
    hold = DiskTier.hold

    def held_up(tier: DiskTier, digest: str) -> HeldFile | None:
        reads.set()
        assert may_read.wait(10)
        return hold(tier, digest)

    monkeypatch.setattr(DiskTier, "hold", held_up)
    first = bench.lease_elsewhere(stored.digest)
    assert reads.wait(10)
    with pytest.raises(AdapterUnavailable, match=r"not loaded within 0\.05 s"):
        bench.store.lease(stored.digest, deadline_s=0.05)
    may_read.set()
    with first.result(10) as lease:
        np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)


def test_a_load_that_gets_no_thread_fails_once_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor keeps what it could not start a thread for, and runs it when one of its threads is free."""
    stored = bench.adapter()
    kept: list[Callable[[], bool]] = []

    def refuse(work: Callable[..., bool], *arguments: object) -> None:
        kept.append(partial(work, *arguments))
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(bench.store._loaders, "submit", refuse)
        with pytest.raises(AdapterUnavailable, match="cannot be loaded any more"):
            bench.store.lease(stored.digest)
    with bench.store.lease(stored.digest) as lease:
        np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)
        for work in kept:
            assert work()
    assert not bench.store._loads
    assert bench.store._host._reserved_bytes == 0
    assert bench.blobs.num_gets == {"packed": 1}


def test_a_store_that_hangs_for_one_adapter_keeps_no_other_waiting(bench: Bench) -> None:
    here, away = bench.adapter(seed=1), bench.adapter(seed=2)
    bench.store.lease(here.digest).release()
    bench.hold_up()
    stuck = bench.lease_elsewhere(away.digest)
    assert bench.blobs.asked.wait(10)
    bench.store.lease(here.digest, deadline_s=5.0).release()
    without_memory = bench.reopen(host_bytes=0)
    without_memory.lease(here.digest, deadline_s=5.0).release()
    assert not stuck.done()
    bench.blobs.may_answer.set()
    stuck.result(10).release()


def test_callers_who_come_and_go_at_random_are_all_answered(bench: Bench) -> None:
    """Bounds are so small that adapters come and go as well; afterwards nothing is held and nothing is under way."""
    adapters = [bench.adapter(seed=seed) for seed in range(4)]
    size = adapters[0].packed.payload.nbytes
    # A file has a header as well: the disk holds one.
    store = bench.reopen(host_bytes=2 * size, disk_bytes=2 * size)
    outcomes: list[str] = []

    def call(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            stored = adapters[random.integers(len(adapters))]
            cancellation = Cancellation()
            timer = threading.Timer(float(random.uniform(0, 0.004)), cancellation.cancel)
            if random.random() < 0.5:
                timer.start()
            try:
                with store.lease(
                    stored.digest, deadline_s=float(random.uniform(0, 0.01)), cancel=cancellation
                ) as lease:
                    np.testing.assert_array_equal(lease.packed.payload, stored.packed.payload)
                outcomes.append("served")
            except AdapterUnavailable:
                outcomes.append("left")
            finally:
                timer.cancel()

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 240
    assert set(outcomes) == {"served", "left"}
    until(lambda: not store._loads)
    assert all(entry.num_leases == 0 for entry in store._host._entries.values())
    assert store._host._reserved_bytes == 0
    assert store.host_used_bytes <= 2 * size

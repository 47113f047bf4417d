from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import AdapterUnavailable, LoadCancelled
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.disk_tier import DiskTier, HeldFile
from loramux.adapter_store.tiers.packed_source import PackedSource
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore
from tests.adapter_store.tiers.open_source import PLENTY, fetch, open_source
from tests.adapter_store.waiting import wait_until


class Bench:
    def __init__(self, target: PackTarget, directory: Path, store_adapter: Any, pool: ThreadPoolExecutor) -> None:
        self.blobs = WatchedBlobStore()
        self._target = target
        self._directory = directory
        self._store_adapter = store_adapter
        self._pool = pool
        self._lock = threading.Lock()
        self.num_downloads = 0
        self.source = self.reopen()

    def reopen(self, disk_bytes: int = PLENTY) -> PackedSource:
        source = open_source(self.blobs, self._target, self._directory, disk_bytes)
        download = source._from_blobs

        def counted(*arguments: Any) -> PackedAdapter:
            with self._lock:
                self.num_downloads += 1
            try:
                return download(*arguments)
            finally:
                with self._lock:
                    self.num_downloads -= 1

        source._from_blobs = counted  # type: ignore[method-assign]
        return source

    def adapter(self, seed: int = 0, is_packed: bool = True) -> Any:
        return self._store_adapter(self.blobs, seed=seed, is_packed=is_packed)

    def hold_up(self) -> None:
        self.blobs.asked.clear()
        self.blobs.may_answer.clear()

    def fetch_elsewhere(self, digest: str, cancellation: Cancellation | None = None) -> Future[PackedAdapter]:
        return self._pool.submit(self.source.fetch, digest, cancellation or Cancellation())

    def give_up(self, digest: str) -> None:
        """Cancel a fetch of this adapter while it hangs in the blob store."""
        self.hold_up()
        cancellation = Cancellation()
        waiting = self.fetch_elsewhere(digest, cancellation)
        assert self.blobs.asked.wait(60)
        cancellation.cancel()
        with pytest.raises(LoadCancelled):
            waiting.result(60)

    def joined(self, digest: str) -> bool:
        """Return whether a fetch has joined the running download of this adapter."""
        return not self.source._running[digest][0].cancellation.is_cancelled

    def files(self) -> list[str]:
        return [path.stem for path in self._directory.glob("disk/*/*.packed")]

    @property
    def num_given_up(self) -> int:
        return self.source.figures.snapshot().num_given_up


@pytest.fixture
def bench(target: PackTarget, tmp_path: Path, store_adapter: Any) -> Iterator[Bench]:
    with ThreadPoolExecutor(8) as pool:
        bench = Bench(target, tmp_path, store_adapter, pool)
        yield bench
        bench.blobs.may_answer.set()


def assert_right(found: PackedAdapter, stored: Any) -> None:
    np.testing.assert_array_equal(found.payload, stored.packed.payload)


def test_cancelled_caller_does_not_affect_others(bench: Bench) -> None:
    left, other = bench.adapter(seed=1), bench.adapter(seed=2)
    bench.hold_up()
    patient = bench.fetch_elsewhere(other.digest)
    # `give_up` waits until the blob store is asked again.
    assert bench.blobs.asked.wait(60)
    bench.give_up(left.digest)
    assert not patient.done()
    bench.blobs.may_answer.set()
    assert_right(patient.result(60), other)
    assert bench.num_given_up == 1


def test_abandoned_download_goes_to_disk_but_not_to_memory(bench: Bench) -> None:
    stored = bench.adapter()
    taken: list[int] = []
    bench.source._allocate = lambda num_bytes: taken.append(num_bytes) or np.empty(num_bytes, np.uint8)
    bench.give_up(stored.digest)
    assert bench.num_given_up == 1
    bench.blobs.may_answer.set()
    wait_until(lambda: bench.files() == [stored.digest])
    assert taken == []
    # Verify the file now, because it was not verified when it was downloaded.
    assert_right(fetch(bench.source, stored.digest), stored)
    assert bench.blobs.num_gets == {"packed": 1}


def test_wrong_bytes_of_an_abandoned_fetch_are_not_served_later(bench: Bench, target: PackTarget) -> None:
    stored = bench.adapter()
    bench.blobs.damage(f"packed/{stored.digest}/{target.pack_key}")
    bench.give_up(stored.digest)
    bench.blobs.may_answer.set()
    wait_until(lambda: bench.files() == [stored.digest])
    assert_right(fetch(bench.source, stored.digest), stored)
    assert bench.source.figures.snapshot().num_set_aside == 2, "once from the disk, once from the blob store"


def test_adapter_without_callers_is_not_packed(bench: Bench) -> None:
    stored = bench.adapter(is_packed=False)
    bench.give_up(stored.digest)
    assert bench.num_downloads == 1
    bench.blobs.may_answer.set()
    wait_until(lambda: not bench.num_downloads)
    assert bench.files() == []
    assert bench.blobs.num_gets == {"packed": 1}, "the canonical file is not requested"


def test_fetch_after_a_cancelled_one_joins_its_download(bench: Bench) -> None:
    stored = bench.adapter()
    bench.give_up(stored.digest)
    for _ in range(3):
        cancellation = Cancellation()
        fetching = bench.fetch_elsewhere(stored.digest, cancellation)
        wait_until(lambda: bench.joined(stored.digest))
        cancellation.cancel()
        with pytest.raises(LoadCancelled):
            fetching.result(60)
    later = bench.fetch_elsewhere(stored.digest)
    wait_until(lambda: bench.joined(stored.digest))
    bench.blobs.may_answer.set()
    assert_right(later.result(60), stored)
    wait_until(lambda: not bench.num_downloads)
    assert bench.files() == [stored.digest]
    assert bench.blobs.num_gets == {"packed": 1}


def test_concurrent_fetches_use_separate_memory(bench: Bench) -> None:
    """Each caller has its own memory for the adapter, so none can release another's."""
    stored = bench.adapter()
    fetches = [bench.fetch_elsewhere(stored.digest) for _ in range(2)]
    assert bench.blobs.asked.wait(60)
    bench.blobs.may_answer.set()
    first, second = (one.result(60) for one in fetches)
    assert_right(first, stored)
    assert_right(second, stored)
    assert not np.shares_memory(first.payload, second.payload)


def test_already_cancelled_fetch_makes_no_request(bench: Bench) -> None:
    stored = bench.adapter()
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(LoadCancelled):
        bench.source.fetch(stored.digest, cancellation)
    assert not bench.blobs.num_gets
    assert bench.num_downloads == 0


def test_read_from_disk_ignores_cancellation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = bench.adapter()
    fetch(bench.source, stored.digest)
    reads, may_read = threading.Event(), threading.Event()
    hold = DiskTier.hold

    def held_up(tier: DiskTier, digest: str) -> HeldFile | None:
        reads.set()
        assert may_read.wait(60)
        return hold(tier, digest)

    monkeypatch.setattr(DiskTier, "hold", held_up)
    cancellation = Cancellation()
    reading = bench.fetch_elsewhere(stored.digest, cancellation)
    assert reads.wait(60)
    cancellation.cancel()
    may_read.set()
    assert_right(reading.result(60), stored)


def test_fetch_without_a_thread_fails_once_and_leaves_nothing_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the executor cannot start a thread, it still runs the task on its next free thread."""
    stored = bench.adapter()
    kept: list[Callable[[], object]] = []

    def refuse(work: Callable[..., object], *arguments: object) -> None:
        kept.append(partial(work, *arguments))
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(bench.source._downloads, "submit", refuse)
        with pytest.raises(AdapterUnavailable, match="no thread can start"):
            fetch(bench.source, stored.digest)
    assert_right(fetch(bench.source, stored.digest), stored)
    for work in kept:
        with pytest.raises(LoadCancelled):
            work()
    assert bench.blobs.num_gets == {"packed": 1}


def test_hanging_fetch_does_not_delay_other_adapters(bench: Bench) -> None:
    here, away = bench.adapter(seed=1), bench.adapter(seed=2)
    fetch(bench.source, here.digest)
    bench.hold_up()
    stuck = bench.fetch_elsewhere(away.digest)
    assert bench.blobs.asked.wait(60)
    assert_right(bench.fetch_elsewhere(here.digest).result(60), here)
    assert not stuck.done()
    bench.blobs.may_answer.set()
    assert_right(stuck.result(60), away)


def test_random_callers_and_cancellations_are_all_answered(bench: Bench) -> None:
    """The disk has room for one adapter, so adapters are evicted and reloaded. No download is left at the end."""
    adapters = [bench.adapter(seed=seed) for seed in range(4)]
    source = bench.reopen(disk_bytes=2 * adapters[0].packed.payload.nbytes)
    outcomes: list[str] = []

    def call(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            stored = adapters[random.integers(len(adapters))]
            cancellation = Cancellation()
            timer = threading.Timer(float(random.uniform(0, 0.004)), cancellation.cancel)
            if random.random() < 0.7:
                timer.start()
            try:
                assert_right(source.fetch(stored.digest, cancellation), stored)
                outcomes.append("served")
            except LoadCancelled:
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
    wait_until(lambda: not bench.num_downloads)
    counts = source.figures.snapshot()
    assert (counts.num_loaded, counts.num_failed, counts.num_set_aside) == (outcomes.count("served"), 0, 0)
    assert source.disk.used_bytes <= 2 * adapters[0].packed.payload.nbytes

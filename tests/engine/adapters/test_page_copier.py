from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters import page_copier
from loramux.engine.adapters.adapter_load import AdapterLoad, AdapterPhase
from loramux.engine.adapters.adapter_pool import AdapterPool, PoolDemand
from loramux.engine.adapters.page_copier import PageCopier
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.device.accelerator import Fence, HostAccelerator
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout
from tests.engine.watched_stager import WatchedStager

GEOMETRY = PageGeometry(num_layers=2, num_kv_heads=1, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
MODULES = (LinearShape("q", 64, 64), LinearShape("o", 64, 32))
OUTER_MODULES = (LinearShape("embedding", 48, 64, is_embedding=True), LinearShape("head", 64, 48))
TARGET = PackTarget(MODULES, GEOMETRY, "float32", OUTER_MODULES)
FACTORS = (3.0, 1.0)
NUM_PAGES, NUM_SLOTS = 12, 3
WAIT_S = 60.0


def packed(digest: str, ranks: list[list[int]], outer_ranks: tuple[int, int] = (0, 0)) -> PackedAdapter:
    layout = TARGET.layout(np.array(ranks, np.int32), np.array(outer_ranks, np.int32))
    shape = (layout.num_pages, GEOMETRY.num_layers, GEOMETRY.page_bytes)
    payload = np.random.default_rng(len(digest)).integers(0, 255, shape, np.uint8)
    return PackedAdapter(digest, layout, np.full((2, 2), 0.5, np.float32), payload, np.full(2, 0.25, np.float32))


class NumberedFence:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        pass


class SteppingAccelerator(HostAccelerator):
    """Counts steps. An upload waits for `may_upload` and records the number of steps before it."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.after: list[int] = []
        self.has_begun, self.may_upload = threading.Event(), threading.Event()
        self.fails = False

    def fence(self) -> Fence:
        return NumberedFence(self.num_steps)

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        assert isinstance(after, NumberedFence)
        self.has_begun.set()
        assert self.may_upload.wait(WAIT_S)
        self.after.append(after.number)
        if self.fails:
            raise RuntimeError("the device is gone")
        super().upload(target, rows, source, after)


class Bench:
    def __init__(self, *adapters: PackedAdapter) -> None:
        self.accelerator = SteppingAccelerator()
        self.stager = WatchedStager({one.digest: one for one in adapters})
        self.views = allocate_pool(
            GEOMETRY, NUM_PAGES * GEOMETRY.total_page_bytes, torch.float32, torch.float32, torch.device("cpu")
        )
        self.tables = SlotTables(TARGET, NUM_SLOTS, self.accelerator, FACTORS)
        self.woken = threading.Event()
        copier = PageCopier(self.views.raw, self.accelerator, self.woken.set, self.stager.figures)
        self.pages = PagePool(NUM_PAGES)
        self.pool = AdapterPool(
            self.pages,
            NUM_SLOTS,
            self.stager,
            copier,
            self.tables,
            LeastRecentlyUsed(),
            on_residency=lambda digest, is_resident: None,
        )

    def poll(self, *wanted: str) -> list[AdapterLoad]:
        return self.pool.poll(PoolDemand({digest: position for position, digest in enumerate(wanted)}))

    def begin(self, digest: str) -> AdapterLoad:
        load = self.pool.prefetch(digest)
        assert self.poll(digest) == []
        assert load.phase is AdapterPhase.COPYING
        return load

    def settle(self, load: AdapterLoad) -> AdapterLoad:
        while True:
            assert self.woken.wait(WAIT_S)
            self.woken.clear()
            settled = self.poll()
            if settled:
                assert settled == [load]
                return load

    def load(self, digest: str) -> AdapterLoad:
        load = self.settle(self.begin(digest))
        assert load.phase is AdapterPhase.RESIDENT
        return load


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20], ids=["copier", "at once"])
def test_adapter_is_copied_completely_into_pages_and_tables(quick_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copier, "QUICK_COPY_BYTES", quick_bytes)
    adapter = packed("a", [[3, 0], [1, 2]])
    bench = Bench(adapter)
    bench.accelerator.may_upload.set()
    load = bench.begin("a")
    assert bench.stager.num_held == 1
    assert bench.woken.wait(WAIT_S)
    pages, slot = load.pages, load.slot
    assert len(pages) == adapter.num_pages
    assert torch.equal(bench.views.raw[pages], torch.from_numpy(adapter.payload))
    assert bench.tables.max_rank(np.array([0, 1, 2], np.int32)) == 0, "nothing is served before it is published"
    assert bench.settle(load).phase is AdapterPhase.RESIDENT
    tables = bench.tables.device
    assert tables.page_table[slot, : len(pages)].tolist() == pages
    assert tables.rank[slot].tolist() == [[3, 0], [1, 2]]
    assert torch.equal(tables.off[slot], torch.from_numpy(adapter.layout.offsets))
    assert tables.scale[slot].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    other = (slot + 1) % NUM_SLOTS
    assert bench.tables.max_rank(np.array([-1, slot, slot], np.int32)) == 3
    assert bench.tables.max_rank(np.array([-1, other], np.int32)) == 0
    assert bench.tables.modules(np.array([-1, slot, slot], np.int32)).tolist() == [True, True]
    assert bench.tables.modules(np.array([-1, other], np.int32)).tolist() == [False, False]
    assert bench.stager.num_held == 0
    bench.pool.close()


def test_outer_module_tables_are_filled_and_cleared_with_the_slot() -> None:
    adapter = packed("both", [[3, 0], [1, 2]], (5, 2))
    plain = packed("a", [[3, 0], [1, 2]])
    bare = adapter_layout(GEOMETRY, MODULES, plain.layout.ranks)
    without = PackedAdapter("bare", bare, plain.scales, plain.payload)
    bench = Bench(adapter, packed("head", [[0, 0], [0, 0]], (0, 7)), plain, without)
    bench.accelerator.may_upload.set()
    both = bench.load("both").slot
    outer = bench.tables.device.outer
    assert outer is not None
    assert outer.page_table.data_ptr() == bench.tables.device.page_table.data_ptr()
    assert outer.rank[both].tolist() == [[5, 2]]
    assert torch.equal(outer.off[both, 0], torch.from_numpy(adapter.layout.outer_offsets))
    # The base scales its embedding's output, so the adapter's output must be scaled too.
    assert outer.scale[both].tolist() == [[0.75, 0.25]]
    assert bench.tables.max_rank(np.array([both], np.int32)) == 5
    head = bench.load("head").slot
    assert bench.tables.max_rank(np.array([head], np.int32)) == 7

    (free,) = {0, 1, 2} - {both, head}
    slots = np.array([-1, free, both, both, head, -1], np.int32)
    samples = np.array([1, 3, 4, 5], np.int32)
    needed = bench.tables.outer_slots(slots, samples)
    assert needed is not None
    assert needed.embedding.tolist() == [-1, -1, both, both, -1, -1]
    assert needed.head.tolist() == [-1, both, head, -1]
    assert bench.tables.outer_slots(slots[:2], samples[:1]) is None
    assert bench.tables.modules(np.array([head], np.int32)).tolist() == [False, False]
    for former, digest, slot in (("both", "a", both), ("head", "bare", head)):
        assert bench.pool.unload(former)
        assert bench.load(digest).slot == slot
    assert bench.tables.outer_slots(slots, samples) is None
    assert not outer.rank.any()
    bench.pool.close()


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy even small adapters on the copier's thread."""
    monkeypatch.setattr(page_copier, "QUICK_COPY_BYTES", 0)


@pytest.mark.usefixtures("copier")
def test_copy_waits_only_for_steps_submitted_before_it() -> None:
    bench = Bench(packed("a", [[3, 0], [1, 2]]))
    bench.accelerator.num_steps = 4
    load = bench.begin("a")
    # Steps submitted later cannot use these pages, so the copy does not wait for them.
    bench.accelerator.num_steps = 9
    bench.accelerator.may_upload.set()
    assert bench.settle(load).phase is AdapterPhase.RESIDENT
    assert bench.accelerator.after == [4]
    bench.pool.close()


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20], ids=["copier", "at once"])
def test_failed_copy_releases_its_hold_and_reports_the_failure(
    quick_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copier, "QUICK_COPY_BYTES", quick_bytes)
    bench = Bench(packed("a", [[3, 0], [1, 2]]))
    bench.accelerator.fails = True
    bench.accelerator.may_upload.set()
    failed = bench.settle(bench.begin("a"))
    assert failed.failure == "copying failed: RuntimeError"
    assert bench.pool.find("a") is None
    assert (bench.pages.num_free, bench.stager.num_held) == (NUM_PAGES, 0)
    bench.accelerator.fails = False
    bench.load("a")
    bench.pool.close()


def test_copied_bytes_on_the_step_thread_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [packed(digest, [[1, 1], [1, 1]]) for digest in ("a", "bb", "ccc")]
    monkeypatch.setattr(page_copier, "QUICK_COPY_BYTES", 2 * adapters[0].payload.nbytes)
    bench = Bench(*adapters)
    bench.accelerator.may_upload.set()
    threads: list[str] = []
    upload, have_all_begun = bench.accelerator.upload, threading.Event()

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 3:
            have_all_begun.set()
        upload(*arguments)

    monkeypatch.setattr(bench.accelerator, "upload", watched)
    digests = [adapter.digest for adapter in adapters]
    for digest in digests:
        bench.pool.prefetch(digest)
    bench.poll(*digests)
    # A copy that has not begun would be dropped.
    assert have_all_begun.wait(WAIT_S)
    bench.pool.close()
    here = threading.current_thread().name
    assert threads == [here, here, "adapter-copier_0"]


def test_missing_adapter_is_reported() -> None:
    bench = Bench()
    bench.pool.prefetch("x")
    (failed,) = bench.poll("x")
    assert (failed.digest, failed.failure) == ("x", "the store has no such adapter")
    bench.pool.close()


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "closed"])
def test_staged_adapter_is_released_if_never_copied(is_dropped: bool) -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]))
    load = bench.pool.prefetch("a")
    # The adapter is not copied, because an earlier sequence is short of pages.
    bench.pool.poll(PoolDemand({"a": 1}, short_position=0))
    assert (load.phase, bench.stager.num_held) == (AdapterPhase.STAGED, 1)
    if is_dropped:
        assert bench.pool.unload("a")
    else:
        bench.pool.close()
    assert bench.stager.num_held == 0
    bench.pool.close()


@pytest.mark.usefixtures("copier")
def test_close_waits_for_the_running_copy_and_drops_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            # The running copy ends only after the later ones have been dropped.
            bench.accelerator.may_upload.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(page_copier, "ThreadPoolExecutor", Thread)
    adapters = [packed(digest, [[1, 1], [1, 1]]) for digest in ("a", "bb")]
    bench = Bench(*adapters)
    for adapter in adapters:
        bench.pool.prefetch(adapter.digest)
    bench.poll("a", "bb")
    assert bench.stager.num_held == 2
    assert bench.accelerator.has_begun.wait(WAIT_S)
    bench.pool.close()
    assert len(bench.accelerator.after) == 1
    assert bench.stager.num_held == 0


def test_cancelled_request_reports_nothing() -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]), packed("b", [[1, 1], [1, 1]]))
    bench.accelerator.may_upload.set()
    bench.stager.is_holding = True
    bench.pool.prefetch("a")
    assert bench.pool.unload("a")
    bench.stager.let_go()
    assert bench.load("b").digest == "b"
    assert bench.pool.find("a") is None
    assert bench.stager.num_held == 0
    bench.pool.close()


def test_close_does_not_wait_for_hanging_requests() -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]))
    bench.stager.is_holding = True
    bench.pool.prefetch("a")
    bench.pool.close()
    bench.stager.let_go()
    assert bench.stager.poll() == []


def test_copies_are_counted_with_their_bytes() -> None:
    adapter = packed("a", [[3, 0], [1, 2]])
    bench = Bench(adapter)
    bench.accelerator.may_upload.set()
    load = bench.load("a")
    (copies,) = (one for one in bench.stager.counts().stages if one.stage == "copy")
    assert (copies.tier, copies.count, copies.num_bytes) == ("pool", 1, adapter.payload.nbytes)
    assert copies.seconds > 0
    assert [(one.tier, one.stage, one.num_bytes) for one in load.stages] == [("pool", "copy", adapter.payload.nbytes)]
    bench.pool.close()

"""Adapters on their way into pages: in what order, and what happens when a part of it fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loramux.adapter_store.blobs.memory import MemoryBlobStore
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import AdapterUnavailable, LoadCancelled
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.tier_figures import TierFigures
from loramux.adapter_store.tiers.tiered_store import TieredStore
from loramux.engine.adapters import tier_loader
from loramux.engine.adapters.adapter_fetching import LeasingFetcher
from loramux.engine.adapters.adapter_loading import Copied, Fetched, LoadEvent, LoadFailed
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.adapters.tier_loader import TierLoader
from loramux.engine.device.accelerator import Fence, HostAccelerator
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout

GEOMETRY = PageGeometry(num_layers=2, num_kv_heads=1, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
MODULES = (LinearShape("q", 64, 64), LinearShape("o", 64, 32))
OUTER_MODULES = (LinearShape("embedding", 48, 64, is_embedding=True), LinearShape("head", 64, 48))
TARGET = PackTarget(MODULES, GEOMETRY, "float32", OUTER_MODULES)
FACTORS = (3.0, 1.0)
NUM_PAGES, NUM_SLOTS = 12, 3


def packed(digest: str, ranks: list[list[int]], outer_ranks: tuple[int, int] = (0, 0)) -> PackedAdapter:
    layout = TARGET.layout(np.array(ranks, np.int32), np.array(outer_ranks, np.int32))
    shape = (layout.num_pages, GEOMETRY.num_layers, GEOMETRY.page_bytes)
    payload = np.random.default_rng(len(digest)).integers(0, 255, shape, np.uint8)
    return PackedAdapter(digest, layout, np.full((2, 2), 0.5, np.float32), payload, np.full(2, 0.25, np.float32))


class Lease:
    def __init__(self, source: Source, packed: PackedAdapter) -> None:
        self._source = source
        self.packed = packed

    def release(self) -> None:
        self._source.num_leases -= 1


class Source:
    """Answers once it may; `hangs` until the fetch is cancelled, as a lease of the tiers does."""

    def __init__(self, *adapters: PackedAdapter) -> None:
        self._adapters = {one.digest: one for one in adapters}
        self.num_leases = 0
        self.hangs = False
        self.asked = threading.Event()

    def lease(self, digest: str, *, cancel: Cancellation) -> Lease:
        if self.hangs:
            cancelled = threading.Event()
            cancel.when_cancelled(cancelled.set)
            self.asked.set()
            assert cancelled.wait(10)
            raise LoadCancelled(f"{digest} is no longer wanted")
        if digest not in self._adapters:
            raise AdapterUnavailable(f"there is no {digest}")
        self.num_leases += 1
        return Lease(self, self._adapters[digest])


class NumberedFence:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None:
        """Only its number matters here."""


class SteppingAccelerator(HostAccelerator):
    """Counts steps; an upload waits until it is let go, and remembers which steps it came after."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.after: list[int] = []
        self.may_upload = threading.Event()
        self.fails = False

    def fence(self) -> Fence:
        return NumberedFence(self.num_steps)

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        assert isinstance(after, NumberedFence)
        assert self.may_upload.wait(10)
        self.after.append(after.number)
        if self.fails:
            raise RuntimeError("the device is gone")
        super().upload(target, rows, source, after)


class Bench:
    """A loader, what it writes into, and the events that it reported."""

    def __init__(self, *adapters: PackedAdapter) -> None:
        self.accelerator = SteppingAccelerator()
        self.source = Source(*adapters)
        self.views = allocate_pool(
            GEOMETRY, NUM_PAGES * GEOMETRY.total_page_bytes, torch.float32, torch.float32, torch.device("cpu")
        )
        self.tables = SlotTables(TARGET, NUM_SLOTS, self.accelerator, FACTORS)
        self.woken = threading.Event()
        self.figures = TierFigures()
        fetcher = LeasingFetcher(self.source, 2, self.woken.set, self.figures)
        self.loader = TierLoader(fetcher, self.views, self.tables, self.accelerator, self.woken.set, self.figures)

    def next_event(self) -> LoadEvent:
        while True:
            events = self.loader.events()
            if events:
                (event,) = events
                return event
            assert self.woken.wait(10)
            self.woken.clear()


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20], ids=["copier", "at once"])
def test_an_adapter_comes_whole_into_its_pages_and_tables(quick_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loader, "QUICK_COPY_BYTES", quick_bytes)
    adapter = packed("a", [[3, 0], [1, 2]])
    bench = Bench(adapter)
    bench.accelerator.may_upload.set()
    bench.loader.fetch("a")
    fetched = bench.next_event()
    assert isinstance(fetched, Fetched)
    pages = [7, 2, 9, 4, 11][: fetched.layout.num_pages]
    bench.loader.copy("a", pages)
    assert bench.next_event() == Copied("a")
    assert torch.equal(bench.views.raw[pages], torch.from_numpy(adapter.payload))
    assert bench.tables.max_rank(np.array([0, 1, 2], np.int32)) == 0, "nothing is served before it is published"
    bench.loader.publish("a", 1, pages)
    tables = bench.tables.device
    assert tables.page_table[1, : len(pages)].tolist() == pages
    assert tables.rank[1].tolist() == [[3, 0], [1, 2]]
    assert torch.equal(tables.off[1], torch.from_numpy(adapter.layout.offsets))
    assert tables.scale[1].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert bench.tables.max_rank(np.array([-1, 1, 1], np.int32)) == 3
    assert bench.tables.max_rank(np.array([-1, 0], np.int32)) == 0
    assert bench.tables.modules(np.array([-1, 1, 1], np.int32)).tolist() == [True, True]
    assert bench.tables.modules(np.array([-1, 0], np.int32)).tolist() == [False, False]
    assert bench.source.num_leases == 0
    bench.loader.close()


def loaded(bench: Bench, digest: str, slot: int) -> None:
    bench.loader.fetch(digest)
    fetched = bench.next_event()
    assert isinstance(fetched, Fetched)
    pages = list(range(fetched.layout.num_pages))
    bench.loader.copy(digest, pages)
    assert bench.next_event() == Copied(digest)
    bench.loader.publish(digest, slot, pages)


def test_outer_modules_come_into_tables_of_their_own_and_leave_them_with_the_slot() -> None:
    adapter = packed("both", [[3, 0], [1, 2]], (5, 2))
    plain = packed("a", [[3, 0], [1, 2]])
    bare = adapter_layout(GEOMETRY, MODULES, plain.layout.ranks)
    without = PackedAdapter("bare", bare, plain.scales, plain.payload)
    bench = Bench(adapter, packed("head", [[0, 0], [0, 0]], (0, 7)), plain, without)
    bench.accelerator.may_upload.set()
    loaded(bench, "both", 1)
    outer = bench.tables.device.outer
    assert outer is not None
    assert outer.page_table.data_ptr() == bench.tables.device.page_table.data_ptr()
    assert outer.rank[1].tolist() == [[5, 2]]
    assert torch.equal(outer.off[1, 0], torch.from_numpy(adapter.layout.outer_offsets))
    # The base multiplies what its embedding gives, and so what the adapter adds to it.
    assert outer.scale[1].tolist() == [[0.75, 0.25]]
    assert bench.tables.max_rank(np.array([1], np.int32)) == 5
    loaded(bench, "head", 2)
    assert bench.tables.max_rank(np.array([2], np.int32)) == 7

    slots, samples = np.array([-1, 0, 1, 1, 2, -1], np.int32), np.array([1, 3, 4, 5], np.int32)
    needed = bench.tables.outer_slots(slots, samples)
    assert needed is not None
    assert needed.embedding.tolist() == [-1, -1, 1, 1, -1, -1]
    assert needed.head.tolist() == [-1, 1, 2, -1]
    assert bench.tables.outer_slots(slots[:2], samples[:1]) is None
    assert bench.tables.modules(np.array([2], np.int32)).tolist() == [False, False]
    loaded(bench, "a", 1)
    loaded(bench, "bare", 2)
    assert bench.tables.outer_slots(slots, samples) is None
    assert not outer.rank.any()
    bench.loader.close()


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies too have a thread of their own."""
    monkeypatch.setattr(tier_loader, "QUICK_COPY_BYTES", 0)


@pytest.mark.usefixtures("copier")
def test_a_copy_comes_after_the_steps_that_were_submitted_before_it_and_no_others() -> None:
    bench = Bench(packed("a", [[3, 0], [1, 2]]))
    bench.loader.fetch("a")
    fetched = bench.next_event()
    assert isinstance(fetched, Fetched)
    bench.accelerator.num_steps = 4
    bench.loader.copy("a", list(range(fetched.layout.num_pages)))
    # Steps that are submitted from here on cannot read these pages for anybody else.
    bench.accelerator.num_steps = 9
    bench.accelerator.may_upload.set()
    assert bench.next_event() == Copied("a")
    assert bench.accelerator.after == [4]
    bench.loader.close()


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20], ids=["copier", "at once"])
def test_a_copy_that_fails_gives_its_hold_back_and_says_so(quick_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loader, "QUICK_COPY_BYTES", quick_bytes)
    bench = Bench(packed("a", [[3, 0], [1, 2]]))
    bench.accelerator.fails = True
    bench.accelerator.may_upload.set()
    bench.loader.fetch("a")
    fetched = bench.next_event()
    assert isinstance(fetched, Fetched)
    bench.loader.copy("a", list(range(fetched.layout.num_pages)))
    failed = bench.next_event()
    assert isinstance(failed, LoadFailed)
    assert "RuntimeError" in failed.message
    assert bench.source.num_leases == 0
    bench.loader.close()


def test_between_two_steps_only_so_much_is_copied_on_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [packed(digest, [[1, 1], [1, 1]]) for digest in ("a", "bb", "ccc")]
    monkeypatch.setattr(tier_loader, "QUICK_COPY_BYTES", 2 * adapters[0].payload.nbytes)
    bench = Bench(*adapters)
    bench.accelerator.may_upload.set()
    threads: list[str] = []
    upload = bench.accelerator.upload

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        upload(*arguments)

    monkeypatch.setattr(bench.accelerator, "upload", watched)
    for adapter in adapters:
        bench.loader.fetch(adapter.digest)
        bench.next_event()
    for place, adapter in enumerate(adapters):
        bench.loader.copy(adapter.digest, list(range(4 * place, 4 * place + adapter.num_pages)))
    bench.loader.close()
    here = threading.current_thread().name
    assert threads == [here, here, "adapter-copier_0"]


def test_an_adapter_that_is_nowhere_is_reported() -> None:
    bench = Bench()
    bench.loader.fetch("x")
    assert bench.next_event() == LoadFailed("x", "there is no x")
    bench.loader.close()


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "closed"])
def test_a_fetched_adapter_that_nobody_copies_is_released(is_dropped: bool) -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]))
    bench.loader.fetch("a")
    bench.next_event()
    assert bench.source.num_leases == 1
    if is_dropped:
        bench.loader.drop("a")
    else:
        bench.loader.close()
    assert bench.source.num_leases == 0
    bench.loader.close()


def test_a_fetch_that_is_cancelled_ends_and_says_nothing() -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]), packed("b", [[1, 1], [1, 1]]))
    bench.source.hangs = True
    bench.loader.fetch("a")
    assert bench.source.asked.wait(10)
    bench.loader.cancel("a")
    bench.source.hangs = False
    bench.loader.fetch("b")
    fetched = bench.next_event()
    assert fetched.digest == "b"
    bench.loader.close()
    assert bench.loader.events() == []


def test_what_came_of_a_cancelled_fetch_is_given_back_and_not_taken_for_the_next() -> None:
    adapter = packed("a", [[3, 0], [1, 2]])
    bench = Bench(adapter)
    bench.accelerator.may_upload.set()
    bench.loader.fetch("a")
    # It has been fetched by the time it is cancelled, and nobody has looked yet.
    assert bench.woken.wait(10)
    bench.woken.clear()
    bench.loader.cancel("a")
    bench.loader.fetch("a")
    assert bench.woken.wait(10)
    events = bench.loader.events()
    assert [type(event) for event in events] == [Fetched]
    assert bench.source.num_leases == 1
    bench.loader.copy("a", list(range(adapter.num_pages)))
    assert bench.next_event() == Copied("a")
    bench.loader.drop("a")
    assert bench.source.num_leases == 0
    bench.loader.close()


def test_closing_waits_for_no_fetch_that_hangs() -> None:
    bench = Bench(packed("a", [[1, 1], [1, 1]]))
    bench.source.hangs = True
    bench.loader.fetch("a")
    assert bench.source.asked.wait(10)
    bench.loader.close()
    assert bench.source.num_leases == 0


def test_copies_are_counted_with_their_bytes() -> None:
    adapter = packed("a", [[3, 0], [1, 2]])
    bench = Bench(adapter)
    bench.accelerator.may_upload.set()
    loaded(bench, "a", 1)
    (copies,) = (one for one in bench.figures.snapshot().stages if one.stage == "copy")
    assert (copies.tier, copies.count, copies.num_bytes) == ("pool", 1, adapter.payload.nbytes)
    assert copies.seconds > 0
    bench.loader.close()


class StuckBlobStore(MemoryBlobStore):
    """Hangs for one adapter."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self._digest = digest
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def get(self, key: str, destination: Path, **limits: Any) -> None:
        if self._digest in key:
            self.is_asked.set()
            assert self.may_answer.wait(20)
        super().get(key, destination, **limits)


def test_a_store_that_hangs_gives_its_thread_back_when_the_fetch_is_cancelled(tmp_path: Path) -> None:
    """With the tiers themselves: the only fetching thread is free for others although the store never answers."""
    stuck, other = "a" * 64, "b" * 64
    blobs = StuckBlobStore(stuck)
    store = TieredStore(blobs, TARGET, tmp_path, 1 << 20, 1 << 20)
    bench = Bench()
    fetcher = LeasingFetcher(store, 1, bench.woken.set, store.figures)
    loader = TierLoader(fetcher, bench.views, bench.tables, bench.accelerator, bench.woken.set, store.figures)
    bench.loader = loader
    loader.fetch(stuck)
    loader.fetch(other)
    assert blobs.is_asked.wait(10)
    assert loader.events() == []
    loader.cancel(stuck)
    failed = bench.next_event()
    assert isinstance(failed, LoadFailed)
    assert failed.digest == other
    loader.close()
    blobs.may_answer.set()
    while not store.figures.snapshot().num_given_up:
        threading.Event().wait(0.005)
    assert store.host_used_bytes == 0

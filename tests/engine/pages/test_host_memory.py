from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from loramux.engine.device.accelerator import Fence, HostAccelerator
from loramux.engine.pages import host_memory
from loramux.engine.pages.host_memory import PinnedHostMemory
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

NUM_PAGES = 6
FLOAT = PageGeometry(num_layers=3, num_kv_heads=2, head_dim=8, kv_itemsize=4, adapter_itemsize=4)
INT8 = replace(FLOAT, kv_itemsize=1, elements_per_scale=8)


def pool_of(geometry: PageGeometry, has_cache_groups: bool) -> PoolViews:
    dtype = torch.int8 if geometry.elements_per_scale else torch.float32
    num_bytes = NUM_PAGES * geometry.pool_page_bytes
    views = allocate_pool(geometry, num_bytes, dtype, torch.float32, torch.device("cpu"), has_cache_groups)
    views.raw.copy_(torch.randint(0, 256, views.raw.shape, generator=torch.Generator().manual_seed(0)))
    if views.kv_scales is not None:
        views.kv_scales.copy_(torch.arange(views.kv_scales.numel()).view(views.kv_scales.shape) % 256)
    return views


def contents(views: PoolViews, page: int) -> list[torch.Tensor]:
    tensors = (views.raw,) if views.kv_scales is None else (views.raw, views.kv_scales)
    return [tensor.view(NUM_PAGES, -1)[page].clone() for tensor in tensors]


@pytest.mark.parametrize("slots_per_piece", [1, 2, 100])
@pytest.mark.parametrize("has_cache_groups", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("geometry", [FLOAT, INT8], ids=["float32", "int8"])
def test_a_page_comes_back_with_its_scales(
    geometry: PageGeometry, has_cache_groups: bool, slots_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", slots_per_piece * geometry.pool_page_bytes)
    views = pool_of(geometry, has_cache_groups)
    memory = PinnedHostMemory([views], HostAccelerator(), 5 * geometry.pool_page_bytes + 1)
    assert memory.num_slots == 5
    assert memory.load_s > 0
    pages = [contents(views, page) for page in range(NUM_PAGES)]
    for slot in range(5):
        memory.save(slot + 1, slot)
    views.raw.fill_(0)
    if views.kv_scales is not None:
        views.kv_scales.fill_(0)
    for slot in range(5):
        memory.load(slot, slot)
    for page in range(5):
        for found, expected in zip(contents(views, page), pages[page + 1], strict=True):
            assert torch.equal(found, expected)
    assert not contents(views, 5)[0].any()


def test_a_page_comes_back_in_all_pools() -> None:
    """A base's own head for drafts has a pool of its own."""
    pools = [pool_of(FLOAT, has_cache_groups=False), pool_of(INT8, has_cache_groups=False)]
    num_bytes = FLOAT.pool_page_bytes + INT8.pool_page_bytes
    memory = PinnedHostMemory(pools, HostAccelerator(), 2 * num_bytes)
    assert memory.num_slots == 2
    saved = [contents(views, 3) for views in pools]
    memory.save(3, 1)
    for views in pools:
        views.raw.fill_(0)
    memory.load(1, 4)
    for views, expected in zip(pools, saved, strict=True):
        assert torch.equal(contents(views, 4)[0], expected[0])


def test_only_copies_between_written_pages_are_timed() -> None:
    """The first write of a page includes the time in which the operating system provides its memory."""
    written: set[int] = set()
    timed: list[bool] = []

    class Noted(HostAccelerator):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            timed.append(target.data_ptr() in written)
            written.add(target.data_ptr())
            super().copy(target, source)

    memory = PinnedHostMemory([pool_of(FLOAT, has_cache_groups=False)], Noted(), 4 * FLOAT.pool_page_bytes)
    num_first = memory.num_slots
    assert len(timed) == (1 + host_memory.NUM_ROUNDS) * num_first
    assert all(timed[num_first:])


def test_a_pause_while_copies_are_timed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, one pause at startup would turn the tier off."""
    now_s, num_fences = [0.0], [0]

    class Paused(HostAccelerator):
        def fence(self) -> Fence:
            # The first round also waits for the operating system.
            now_s[0] += (1.0, 4.0, 9.0, 4.0)[num_fences[0]]
            num_fences[0] += 1
            return super().fence()

    monkeypatch.setattr(host_memory, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    memory = PinnedHostMemory([pool_of(FLOAT, has_cache_groups=False)], Paused(), 4 * FLOAT.pool_page_bytes)
    assert memory.load_s == 1.0


def test_memory_without_room_for_a_page_is_refused() -> None:
    views = pool_of(FLOAT, has_cache_groups=False)
    with pytest.raises(
        ConfigNotUsable, match=r"a page of keys and values takes 6144: set it to at least 6144, or to 0"
    ):
        PinnedHostMemory([views], HostAccelerator(), FLOAT.pool_page_bytes - 1)

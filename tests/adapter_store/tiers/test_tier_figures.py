"""Each lookup and each stage of a load is counted where it happened, with its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.tiers.tier_figures import STAGES, LoadCounts
from loramux.adapter_store.tiers.tiered_store import TieredStore
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore

PLENTY = 1 << 30


def lookups(counts: LoadCounts) -> dict[str, tuple[int, int]]:
    return {tier.tier: (tier.num_hits, tier.num_misses) for tier in counts.tiers}


def stages(counts: LoadCounts) -> dict[str, tuple[int, int]]:
    """How often, and with how many bytes; only those that were gone through."""
    return {f"{one.tier} {one.stage}": (one.count, one.num_bytes) for one in counts.stages if one.count}


def test_a_load_is_counted_tier_by_tier(target: PackTarget, tmp_path: Path, store_adapter: Any) -> None:
    blobs = WatchedBlobStore()
    stored = store_adapter(blobs)
    size = stored.packed.payload.nbytes
    num_canonical = len(blobs.read_bytes(f"adapters/{stored.digest}.safetensors"))
    store = TieredStore(blobs, target, tmp_path / "disk", PLENTY, PLENTY)
    store.lease(stored.digest).release()
    counts = store.figures.snapshot()
    assert lookups(counts) == {"host": (0, 1), "disk": (0, 1), "blobs": (1, 1)}
    assert stages(counts) == {
        "host lookup": (1, 0),
        "disk lookup": (1, 0),
        "blobs fetch": (1, num_canonical),
        "blobs verify": (2, num_canonical + size),
        "blobs pack": (1, num_canonical),
        "disk read": (1, size),
    }
    held = {tier.tier: tier.used_bytes for tier in counts.tiers}
    assert held["host"] == size
    assert held["disk"] == store.disk_used_bytes > size
    store.lease(stored.digest).release()
    assert lookups(store.figures.snapshot())["host"] == (1, 1)

    again = TieredStore(blobs, target, tmp_path / "disk", PLENTY, 0)
    for _ in range(3):
        again.lease(stored.digest).release()
    counts = again.figures.snapshot()
    assert lookups(counts) == {"host": (0, 3), "disk": (3, 0), "blobs": (0, 0)}
    assert stages(counts)["disk verify"] == stages(counts)["disk read"] == (3, 3 * size)
    assert {tier.tier: tier.num_evictions for tier in counts.tiers}["host"] == 3
    assert (counts.num_loaded, counts.num_failed, counts.num_given_up, counts.num_set_aside) == (3, 0, 0, 0)
    assert all(one.seconds > 0 for one in counts.stages if one.count)


def test_failures_are_counted_and_the_series_are_always_the_same(target: PackTarget, tmp_path: Path) -> None:
    store = TieredStore(WatchedBlobStore(), target, tmp_path / "disk", PLENTY, PLENTY)
    before = store.figures.snapshot()
    for number in range(5):
        with pytest.raises(AdapterUnavailable):
            store.lease(f"{number:064x}")
    after = store.figures.snapshot()
    assert (after.num_failed, after.num_loaded) == (5, 0)
    assert lookups(after)["blobs"] == (0, 10)
    for counts in (before, after):
        assert tuple((one.tier, one.stage) for one in counts.stages) == STAGES
        assert [tier.tier for tier in counts.tiers] == ["host", "disk", "blobs"]

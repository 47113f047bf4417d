from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.tiers.tier_figures import STAGES, LoadCounts, PassedStage
from tests.adapter_store.blobs.watched_blobs import WatchedBlobStore
from tests.adapter_store.tiers.open_source import fetch, open_source


def lookups(counts: LoadCounts) -> dict[str, tuple[int, int]]:
    return {tier.tier: (tier.num_hits, tier.num_misses) for tier in counts.tiers}


def stages(counts: LoadCounts) -> dict[str, tuple[int, int]]:
    """The count and the number of bytes of each stage that ran."""
    return {f"{one.tier} {one.stage}": (one.count, one.num_bytes) for one in counts.stages if one.count}


def test_each_stage_of_a_load_is_counted_in_its_tier(target: PackTarget, tmp_path: Path, store_adapter: Any) -> None:
    blobs = WatchedBlobStore()
    stored = store_adapter(blobs)
    size = stored.packed.payload.nbytes
    num_canonical = len(blobs.read_bytes(f"adapters/{stored.digest}.safetensors"))
    source = open_source(blobs, target, tmp_path)
    noted: list[PassedStage] = []
    with source.figures.noting(noted):
        fetch(source, stored.digest)
    counts = source.figures.snapshot()
    assert lookups(counts) == {"host": (0, 0), "disk": (0, 1), "blobs": (1, 1)}
    assert stages(counts) == {
        "disk lookup": (1, 0),
        "blobs fetch": (1, num_canonical),
        "blobs verify": (2, num_canonical + size),
        "blobs pack": (1, num_canonical),
        "disk read": (1, size),
    }
    held = {tier.tier: tier.used_bytes for tier in counts.tiers}
    assert held["disk"] == source.disk.used_bytes > size
    passed = [f"{one.tier} {one.stage}" for one in noted]
    assert sorted(passed) == sorted([*stages(counts), "blobs verify"]), "includes stages on the source's threads"
    assert all(one.started_ns <= one.ended_ns for one in noted)

    again = open_source(blobs, target, tmp_path)
    for _ in range(3):
        fetch(again, stored.digest)
    counts = again.figures.snapshot()
    assert len(noted) == len(passed), "stages outside the block are not recorded"
    assert lookups(counts) == {"host": (0, 0), "disk": (3, 0), "blobs": (0, 0)}
    assert stages(counts)["disk verify"] == stages(counts)["disk read"] == (3, 3 * size)
    assert (counts.num_loaded, counts.num_failed, counts.num_given_up, counts.num_set_aside) == (3, 0, 0, 0)
    assert all(one.seconds > 0 for one in counts.stages if one.count)


def test_failures_are_counted_in_a_fixed_set_of_series(target: PackTarget, tmp_path: Path) -> None:
    source = open_source(WatchedBlobStore(), target, tmp_path)
    before = source.figures.snapshot()
    for number in range(5):
        with pytest.raises(AdapterUnavailable):
            fetch(source, f"{number:064x}")
    after = source.figures.snapshot()
    assert (after.num_failed, after.num_loaded) == (5, 0)
    assert lookups(after)["blobs"] == (0, 10)
    for counts in (before, after):
        assert tuple((one.tier, one.stage) for one in counts.stages) == STAGES
        assert [tier.tier for tier in counts.tiers] == ["host", "disk", "blobs"]

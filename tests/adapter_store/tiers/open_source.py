from __future__ import annotations

from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.tiers.packed_source import PackedSource

PLENTY = 1 << 30


def open_source(
    blobs: BlobStore, target: PackTarget, tmp_path: Path, disk_bytes: int = PLENTY, base: Path | None = None
) -> PackedSource:
    """Open a source with a new disk tier. The base's weights are in `base`, or else in `tmp_path`."""
    return PackedSource(
        blobs, DiskTier(tmp_path / "disk", disk_bytes, target.pack_key), target, BaseWeights(base or tmp_path)
    )


def fetch(source: PackedSource, digest: str) -> PackedAdapter:
    return source.fetch(digest, Cancellation())

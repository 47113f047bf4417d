from __future__ import annotations

import numpy as np

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.kernels.layout import AdapterLayout


def adapter(digest: str, size: int = 10) -> PackedAdapter:
    ranks = np.zeros((0, 0), np.int32)
    layout = AdapterLayout(ranks, np.zeros((0, 0, 3), np.int32), size)
    return PackedAdapter(digest, layout, np.zeros((0, 0), np.float32), np.zeros((size, 1, 1), np.uint8))


def filled(max_bytes: int, *digests: str) -> HostTier:
    tier = HostTier(max_bytes)
    for digest in digests:
        tier.add(adapter(digest), 0)
    return tier


def content(tier: HostTier) -> str:
    return "".join(sorted(digest for digest in "abcdefgh" if digest in tier))

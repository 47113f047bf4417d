"""Packed adapters of one rank in a disk tier, with seeded random contents."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.random_model import Shape
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.kernels.layout import LinearShape, PageGeometry


def target_of(shape: Shape) -> PackTarget:
    """The target for adapters on all seven linear layers of a Llama of this shape, in bfloat16."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.hidden_size // shape.num_heads
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    modules = (
        LinearShape("self_attn.q_proj", hidden, queries),
        LinearShape("self_attn.k_proj", hidden, keys),
        LinearShape("self_attn.v_proj", hidden, keys),
        LinearShape("self_attn.o_proj", queries, hidden),
        LinearShape("mlp.gate_proj", hidden, inner),
        LinearShape("mlp.up_proj", hidden, inner),
        LinearShape("mlp.down_proj", inner, hidden),
    )
    geometry = PageGeometry(shape.num_layers, shape.num_kv_heads, head_dim, kv_itemsize=2, adapter_itemsize=2)
    return PackTarget(modules, geometry, "bfloat16")


@dataclass(frozen=True, slots=True)
class HotFiles:
    """`count` adapters of one rank. `directory` is a disk tier that contains all of them."""

    target: PackTarget
    rank: int
    count: int
    directory: Path

    @property
    def digests(self) -> list[str]:
        return [hashlib.sha256(f"{self.rank} {number}".encode()).hexdigest() for number in range(self.count)]

    @property
    def tier_bytes(self) -> int:
        return 2 * self.count * (self.payload_bytes + (1 << 20))

    @property
    def payload_bytes(self) -> int:
        return self.num_pages * self.target.geometry.total_page_bytes

    @property
    def num_pages(self) -> int:
        return self.target.layout(self._ranks()).num_pages

    def path(self, digest: str) -> Path:
        return self.directory / self.target.pack_key / f"{digest}.packed"

    def payload(self, digest: str) -> npt.NDArray[np.uint8]:
        """The contents of the adapter's pages, as [num_pages, num_layers, page_bytes]."""
        shape = (self.num_pages, self.target.geometry.num_layers, self.target.geometry.page_bytes)
        return np.random.default_rng(int(digest[:8], 16)).integers(0, 256, shape, np.uint8)

    def make(self) -> None:
        """Write all files through to the disk, so that the operating system can drop them from its page cache."""
        tier = DiskTier(self.directory, self.tier_bytes, self.target.pack_key)
        layout = self.target.layout(self._ranks())
        scales = np.full(layout.ranks.shape, 2.0, np.float32)
        for digest in self.digests:
            file = tier.new_file()
            write_packed(file, PackedAdapter(digest, layout, scales, self.payload(digest)), self.target)
            tier.add(digest, file)

    def drop_cached(self) -> None:
        """Ask the operating system to drop its cached pages of the files, so that the next read is from the disk."""
        for digest in self.digests:
            drop_cached(self.path(digest))

    def _ranks(self) -> npt.NDArray[np.int32]:
        return self.target.equal_ranks(self.rank)


def drop_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    # The operating system keeps pages that have not been written to the disk.
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)

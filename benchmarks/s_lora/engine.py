"""An in-process CPU engine whose pool holds only some of the adapters on disk."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.running_engine import RunningEngine, start_engine
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.workload import Lengths
from loramux.engine.loop.config import EngineConfig
from loramux.engine.server.gc_freeze import freeze_gc

PAGE_TOKENS = 16
DISK_BYTES = 64 << 30
"""Size of the disk tier, in bytes. All adapters fit, so none is fetched from the blob store."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool for `num_adapters` adapters and the K and V of `num_sequences` sequences of average length.

    There are enough adapter slots to fill the pool with adapters, so only pages limit the number of adapters. The
    host tier holds `num_host_adapters` adapters. All other adapters are read from disk.
    """

    num_adapters: int
    num_sequences: int
    num_host_adapters: int
    prompts: Lengths
    outputs: Lengths

    @property
    def kv_pages(self) -> int:
        return self.num_sequences * -(-int(self.prompts.mean + self.outputs.mean) // PAGE_TOKENS)


@contextmanager
def open_engine(
    base: Path, files: AdapterFiles, plan: PoolPlan, dtype: str, policy: str, num_threads: int
) -> Iterator[RunningEngine]:
    adapter_pages, page_bytes = files.num_pages(dtype), files.page_bytes(dtype)
    num_pages = plan.kv_pages + plan.num_adapters * adapter_pages
    document = {
        "model_dir": str(base),
        "blob_url": files.blob_url,
        "cache_dir": str(files.cache_dir),
        "dtype": dtype,
        "pool_bytes": num_pages * page_bytes,
        "max_sequences": plan.num_sequences,
        "max_resident_adapters": max(1, num_pages // adapter_pages),
        "disk_tier_bytes": DISK_BYTES,
        "host_tier_bytes": plan.num_host_adapters * adapter_pages * page_bytes,
        "num_threads": num_threads,
        "eviction_policy": policy,
    }
    with start_engine(msgspec.convert(document, EngineConfig)) as engine:
        # An engine process also does this before it starts serving.
        freeze_gc()
        try:
            yield engine
        finally:
            gc.unfreeze()

"""An in-process CPU engine whose pool holds only some of the adapters on disk."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.s_lora.workload import Lengths
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.engine import Outbound
from loramux.engine.protocol.messages import Add, Stats, StatsRequest
from loramux.engine.server.gc_freeze import freeze_gc

PAGE_TOKENS = 16
WAKE_S = 0.001
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


@dataclass(frozen=True, slots=True, eq=False)
class OpenEngine:
    assembled: AssembledEngine
    wake: threading.Event

    @property
    def num_sequences(self) -> int:
        return self.assembled.engine.num_sequences

    def add(self, add: Add) -> None:
        self.assembled.engine.add(b"", add)

    def is_resident(self, digest: str | None) -> bool:
        return any(one.digest == digest for one in self.stats().adapters)

    def stats(self) -> Stats:
        return self.assembled.engine.stats(StatsRequest(call_id=""))

    def step(self, wait_s: float = WAKE_S) -> list[Outbound]:
        """Run one step, or wait at most `wait_s` if nothing can run, and return the engine's messages."""
        if not self.assembled.engine.step():
            self.wake.wait(wait_s)
            self.wake.clear()
        return self.assembled.engine.take_outbox()

    def abort(self) -> None:
        self.assembled.engine.abort_all()
        while self.assembled.engine.has_work:
            self.step()
        self.assembled.engine.take_outbox()


@contextmanager
def open_engine(
    base: Path, files: AdapterFiles, plan: PoolPlan, dtype: str, policy: str, num_threads: int
) -> Iterator[OpenEngine]:
    wake = threading.Event()
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
    assembled = assemble_engine(msgspec.convert(document, EngineConfig), wake.set)
    # An engine process also does this before it starts serving.
    freeze_gc()
    try:
        yield OpenEngine(assembled, wake)
    finally:
        assembled.adapters.close()
        gc.unfreeze()

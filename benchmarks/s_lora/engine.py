"""A CPU engine in this process over adapters on disk, whose pool holds only some of them."""

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
from loramux.engine.assembly import AssembledEngine, assemble_engine
from loramux.engine.config import EngineConfig
from loramux.engine.engine import Outbound
from loramux.engine.messages import Add, Stats, StatsRequest
from loramux.engine.server.gc_freeze import freeze_gc

PAGE_TOKENS = 16
WAKE_S = 0.001
DISK_BYTES = 64 << 30
"""More than all adapters take: what is measured is the way from the disk, never from the blob store."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool for `num_adapters` adapters beside the K and V of `num_sequences` sequences at their mean full length.

    There are slots for as many adapters as all pages could hold: pages are what is scarce. The host tier holds
    `num_host_adapters`; what is in neither is read from the disk.
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
    """An engine that this thread steps."""

    assembled: AssembledEngine
    wake: threading.Event

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait."""
        return self.assembled.engine.num_sequences

    def add(self, add: Add) -> None:
        self.assembled.engine.add(b"", add)

    def is_resident(self, digest: str | None) -> bool:
        return any(one.digest == digest for one in self.stats().adapters)

    def stats(self) -> Stats:
        return self.assembled.engine.stats(StatsRequest(call_id=""))

    def step(self, wait_s: float = WAKE_S) -> list[Outbound]:
        """One step, or a wait of at most `wait_s` where nothing can run; what the engine said."""
        if not self.assembled.engine.step():
            self.wake.wait(wait_s)
            self.wake.clear()
        return self.assembled.engine.take_outbox()

    def abort(self) -> None:
        """End all sequences and wait for nothing they asked for."""
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
    # As an engine's process does before it serves.
    freeze_gc()
    try:
        yield OpenEngine(assembled, wake)
    finally:
        assembled.adapters.close()
        gc.unfreeze()

"""Measures how fast adapters load from the disk tier into the pool, compared with a plain read of the same files.

The benchmark runs on a CPU with adapters of several ranks on all linear layers of a 1B Llama. Files are read from the
page cache (warm) and, after the operating system has been asked to drop them, from the disk (cold). Six methods
alternate:

    plain     one thread reads each file's pages in order, straight into the pages of the pool
    memory    one thread fetches adapters from the disk tier into host memory: open, lock, read, verify
    fetch     like `memory`, with the staging process's number of threads; a GPU would copy from host memory
    pool      the staging process reads into shared memory, and a thread of this process copies to the pool's pages
    one       like `pool`, but one adapter at a time, from the request until its tables are published
    first     like `pool`, with a new staging process

The result is each method's throughput relative to `plain` in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure, rotated
from benchmarks.hot_load_files import HotFiles, target_of
from benchmarks.random_model import SHAPES
from benchmarks.tables import table
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.tiers.host_slab import EngineMemory, HostSlab
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.packed_source import PackedSource
from loramux.adapter_store.tiers.staging_client import StagingClient
from loramux.adapter_store.tiers.staging_link import OPEN_S
from loramux.adapter_store.tiers.tier_figures import StageCounts
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.adapter_pool import AdapterPool, PoolDemand
from loramux.engine.adapters.page_copier import PageCopier
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import SWITCH_INTERVAL_S
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.pool_memory import allocate_pool
from tests.adapter_store.memory_blobs import MemoryBlobStore

PLAIN, MEMORY, FETCH, POOL, ONE, FIRST = WAYS = ("plain", "memory", "fetch", "pool", "one", "first")
TARGET = 0.8
"""Lowest throughput of `pool`, relative to `plain`, that meets the target."""

MAX_UNDER_WAY = 6
"""Maximum number of concurrent loads. Memory is reserved for one more adapter."""

MIN_FILES = 8
"""Minimum number of files. With fewer, the first and last loads, which overlap with few other loads, would dominate."""


class OpenPool:
    """An adapter pool fed by a staging process, and the pipe that wakes a waiting thread."""

    def __init__(self, bench: Bench) -> None:
        files = bench.files
        self._wake_read, self._wake_write = os.pipe()
        self.stager = StagingClient(
            files.target,
            f"file://{files.directory / 'no_blobs'}",
            str(files.directory),
            files.tier_bytes,
            str(files.directory),
            EngineMemory(bench.memory_bytes),
            # Without a host tier, each load starts at the disk tier.
            HostTier(0),
            bench.num_loaders,
            self._wake,
        )
        self.stager.open(OPEN_S)
        copier = PageCopier(bench.views.raw, bench.accelerator, self._wake, self.stager.figures)
        pages = PagePool(bench.views.raw.shape[0])
        self.adapters = AdapterPool(
            pages,
            files.count,
            self.stager,
            copier,
            bench.tables,
            LeastRecentlyUsed(),
            on_residency=lambda digest, is_resident: None,
        )

    @property
    def processor_s(self) -> float:
        """CPU time used by the staging process so far."""
        clock = ctypes.c_int()
        pid = self.stager.pid
        if pid is None or ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
            raise OSError("the staging process has exited")
        return time.clock_gettime(clock.value)

    def wait(self) -> None:
        """Block until a fetch or a copy may have finished."""
        ready = select.select([self.stager, self._wake_read], [], [])[0]  # type: ignore[type-var]
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)

    def close(self) -> None:
        self.adapters.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")


class Bench:
    """The engine's own components between the disk tier and the pool."""

    def __init__(self, files: HotFiles, num_loaders: int) -> None:
        self.files = files
        self.num_loaders = num_loaders
        target, geometry = files.target, files.target.geometry
        self.accelerator = HostAccelerator()
        # Make room for every adapter, so that nothing is evicted between rounds.
        self.views = allocate_pool(
            geometry, files.count * files.payload_bytes, torch.bfloat16, torch.bfloat16, self.accelerator.device
        )
        self.tables = SlotTables(target, files.count, self.accelerator, ())
        self.memory_bytes = (MAX_UNDER_WAY + 1) * (files.payload_bytes + (1 << 20))
        self._slab = HostSlab(np.empty(self.memory_bytes, np.uint8))
        self.source = self.open_source()
        self._opened = OpenPool(self)
        self._newest = self._opened

    def open_source(self) -> PackedSource:
        """Return a source that reads from the disk tier and falls back to an empty blob store."""
        files = self.files
        disk = DiskTier(files.directory, files.tier_bytes, files.target.pack_key)
        return PackedSource(MemoryBlobStore(), disk, files.target, BaseWeights(files.directory), self._slab.allocate)

    def stage_counts(self) -> dict[tuple[str, str], StageCounts]:
        """Stage counters of the long-lived staging process and the pool that it feeds."""
        return {(one.tier, one.stage): one for one in self._opened.stager.counts().stages}

    @property
    def processor_s(self) -> float:
        """CPU time of this process and of the most recently started staging process."""
        return time.process_time() + self._newest.processor_s

    def prepare(self, way: str) -> None:
        """Unload all adapters, and start a new staging process for `first`. This is not timed."""
        if self._newest is not self._opened:
            self._newest.close()
            self._newest = self._opened
        if way == FIRST:
            self._newest = OpenPool(self)
        for digest in self.files.digests:
            self._newest.adapters.unload(digest)

    def close(self) -> None:
        self.prepare(POOL)
        self._opened.close()

    def pages(self, number: int) -> list[int]:
        return list(range(number * self.files.num_pages, (number + 1) * self.files.num_pages))

    def plain(self) -> None:
        pages = self.views.raw.numpy().reshape(self.files.count, -1)
        for number, digest in enumerate(self.files.digests):
            with FileIO(self.files.path(digest)) as file:
                file.seek(-self.files.payload_bytes, os.SEEK_END)
                view = pages[number].data
                while num_read := file.readinto(view):
                    view = view[num_read:]

    def memory(self) -> None:
        for digest in self.files.digests:
            self._fetch(digest)

    def fetch(self) -> None:
        with ThreadPoolExecutor(self.num_loaders) as threads:
            for _ in threads.map(self._fetch, self.files.digests):
                continue

    def pool(self) -> None:
        self._load(MAX_UNDER_WAY)

    def one(self) -> None:
        self._load(1)

    def first(self) -> None:
        self._load(MAX_UNDER_WAY)

    def _fetch(self, digest: str) -> None:
        self.source.fetch(digest, Cancellation())

    def _load(self, max_under_way: int) -> None:
        """Load every adapter, `max_under_way` at a time, as the engine's thread would between steps."""
        adapters = self._newest.adapters
        waiting, under_way = deque(self.files.digests), dict[str, AdapterLoad]()
        while waiting or under_way:
            while waiting and len(under_way) < max_under_way:
                digest = waiting.popleft()
                under_way[digest] = adapters.prefetch(digest)
            settled = adapters.poll(PoolDemand({digest: position for position, digest in enumerate(under_way)}))
            for load in settled:
                if load.failure is not None:
                    raise CheckError(f"an adapter could not be loaded: {load.failure}")
                del under_way[load.digest]
            if under_way and not settled:
                self._newest.wait()

    def _pages_of(self, way: str, number: int, digest: str) -> list[int]:
        load = None if way == PLAIN else self._newest.adapters.find(digest)
        return self.pages(number) if load is None else load.pages

    def check(self) -> int:
        """Compare every byte in the pool with the stored files, and check that a damaged file is refused.

        Returns the number of bytes compared.
        """
        num_bytes = 0
        for way, load in ((PLAIN, self.plain), (FIRST, self.first), (POOL, self.pool)):
            self.prepare(way)
            self.views.raw.zero_()
            load()
            for number, digest in enumerate(self.files.digests):
                found = self.views.raw[self._pages_of(way, number, digest)].numpy()
                if not np.array_equal(found, self.files.payload(digest)):
                    raise CheckError("bytes in the pool differ from the stored file")
                num_bytes += found.nbytes
        self._check_damage()
        return num_bytes

    def _check_damage(self) -> None:
        digest = self.files.digests[-1]
        path = self.files.path(digest)
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1000, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        for source in (self.source, self.open_source()):
            try:
                source.fetch(digest, Cancellation())
            except AdapterUnavailable:
                continue
            raise CheckError("a damaged file was accepted")
        self.files.make()
        self.memory()


@dataclass(frozen=True, slots=True)
class Round:
    bytes_s: float
    processor_s: float
    """CPU seconds of all threads per gigabyte."""


def measure(bench: Bench, is_cold: bool, num_rounds: int) -> dict[str, list[Round]]:
    ways: dict[str, Callable[[], None]] = {way: getattr(bench, way) for way in WAYS}
    num_bytes = bench.files.count * bench.files.payload_bytes
    found: dict[str, list[Round]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        for way in rotated(WAYS, number):
            bench.prepare(way)
            if is_cold:
                bench.files.drop_cached()
            before_s = bench.processor_s
            started_s = time.perf_counter()
            ways[way]()
            seconds = time.perf_counter() - started_s
            processor_s = bench.processor_s - before_s
            if number:
                found[way].append(Round(num_bytes / seconds, processor_s / num_bytes * 1e9))
    return found


def figures_of(bench: Bench, is_cold: bool, found: dict[str, list[Round]], stages: dict[str, float]) -> dict[str, Any]:
    """One case's figures. Each ratio is the median of the per-round ratios."""
    ways: dict[str, dict[str, Any]] = {}
    for way, rounds in found.items():
        ratios = [one.bytes_s / plain.bytes_s for one, plain in zip(rounds, found[PLAIN], strict=True)]
        ways[way] = {
            "MB_s": round(statistics.median(one.bytes_s for one in rounds) / 1e6, 1),
            "over_plain": round(statistics.median(ratios), 3),
            "over_plain_rounds": [round(ratio, 3) for ratio in ratios],
            "processor_s_per_GB": round(statistics.median(one.processor_s for one in rounds), 3),
        }
    return {
        "rank": bench.files.rank,
        "files": bench.files.count,
        "file_MB": round(bench.files.payload_bytes / 1e6, 2),
        "page_cache": "cold" if is_cold else "warm",
        "ways": ways,
        "stage_s_per_GB": stages,
        "meets_target": ways[POOL]["over_plain"] >= TARGET,
    }


@contextmanager
def stages_of(bench: Bench) -> Iterator[dict[str, float]]:
    """Seconds per gigabyte in each loading stage during the `with` block, from the engine's own statistics."""
    found: dict[str, float] = {}
    before = bench.stage_counts()
    yield found
    after = bench.stage_counts()
    num_bytes = after["disk", "read"].num_bytes - before["disk", "read"].num_bytes
    for (tier, stage), one in after.items():
        if one.count > before[tier, stage].count:
            # Divide by the stage's own bytes, if it counts any, because only some methods reach the pool.
            per = one.num_bytes - before[tier, stage].num_bytes or num_bytes
            found[f"{tier} {stage}"] = round((one.seconds - before[tier, stage].seconds) / per * 1e9, 4)


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for case in cases:
        ways = case["ways"]
        ratios = [f"{ways[way]['over_plain']:.2f}" for way in WAYS[1:]]
        verdict = "met" if case["meets_target"] else "missed"
        labels = str(case["rank"]), f"{case['file_MB']:.1f}", case["page_cache"], f"{ways[PLAIN]['MB_s']:.0f}"
        rows.append([*labels, *ratios, verdict])
    headings = ("rank", "MB", "cache", "plain MB/s", *WAYS[1:], "target")
    return table("throughput from the disk tier, relative to a plain read of the same files", headings, rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("hot_load", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="1b", help="model that the adapters are made for")
    add("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[8, 16, 64], metavar="8,16,64")
    add("--megabytes", type=int, default=360, help="total size of the files for each rank")
    add("--rounds", type=int, default=9, help="rounds per method; the median is reported")
    add("--loaders", type=int, default=4, help="threads of the staging process; one engine thread copies")
    add("--skip-cold", action="store_true", help="measure warm loads only")
    add("--scratch", type=Path, default=SCRATCH / "hot_load", help="directory for the files, on the disk to measure")
    arguments = parser.parse_args(argv)
    if min(*arguments.ranks, arguments.megabytes, arguments.rounds, arguments.loaders) < 1:
        parser.error("--ranks, --megabytes, --rounds and --loaders must be above 0")
    return arguments


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    arguments = run.arguments
    # Use the engine's switch interval, so that threads get the interpreter lock quickly.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    target = target_of(SHAPES[arguments.model])
    cases: list[dict[str, Any]] = []
    num_checked = 0
    for rank in arguments.ranks:
        size = HotFiles(target, rank, 1, arguments.scratch).payload_bytes
        count = max(MIN_FILES, arguments.megabytes * 1_000_000 // size)
        files = HotFiles(target, rank, count, arguments.scratch / str(rank))
        files.make()
        with closing(Bench(files, arguments.loaders)) as bench:
            num_checked += bench.check()
            run.console.print(
                f"rank {rank}: {files.count} files of {files.payload_bytes / 1e6:.1f} MB reached the pool intact"
            )
            for is_cold in (False,) if arguments.skip_cold else (False, True):
                with stages_of(bench) as stages:
                    found = measure(bench, is_cold, arguments.rounds)
                cases.append(figures_of(bench, is_cold, found, stages))
    run.console.print(table_of(cases))
    workload = {
        "model": arguments.model,
        "dtype": target.dtype,
        "loaders": arguments.loaders,
        "rounds": arguments.rounds,
        "target": f"pool at least {TARGET} of plain",
    }
    run.say(workload)
    checked = {"bytes_compared": num_checked, "damaged_files_refused": 2 * len(arguments.ranks)}
    run.write({"workload": workload, "check": checked, "cases": cases})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Where a staging process gets packed adapters: memory, else the local disk, else the blob store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import AdapterUnavailable, BlobStoreUnavailable, LoadCancelled, StoreError
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packed_file import HostMemory, plain_memory
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.leases import Lease
from loramux.adapter_store.tiers.packed_source import PackedSource
from loramux.adapter_store.tiers.shared_load import SharedLoad
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import Held, TierFigures

_Way = Callable[[str, HostMemory, Callable[[], None]], PackedAdapter | None]
"""Brings an adapter into memory, or None; see `PackedSource`."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_LOADS = 64
"""Loads on threads of their own, those included that were given up but hang in the blob store; more wait for one."""


class TieredStore:
    """Leases packed adapters by digest. Thread-safe; `lease` blocks: call it from loader threads.

    Both bounded tiers evict the least recently used first and never what is leased or being read. `PackedSource` says
    which bytes are verified when. Packed adapters lie in memory from `allocate`, for which the host tier has made room
    before it is asked.
    """

    def __init__(
        self,
        blobs: BlobStore,
        target: PackTarget,
        disk_dir: Path,
        disk_bytes: int,
        host_bytes: int,
        allocate: HostMemory = plain_memory,
        figures: TierFigures | None = None,
    ) -> None:
        self.figures = figures or TierFigures()
        self.figures.breaker = lambda: blobs.breaker_state
        self._disk = DiskTier(disk_dir, disk_bytes, target.pack_key)
        self._source = PackedSource(blobs, target, self._disk, self.figures)
        self._host = HostTier(host_bytes)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._loads: dict[str, SharedLoad] = {}
        # Loads from the blob store have threads of their own, so that those who wait can leave.
        self._loaders = ThreadPoolExecutor(_MAX_LOADS, thread_name_prefix="adapter-load")
        self.figures.held = lambda: {
            "host": Held(self._host.used_bytes, self._host.num_evictions),
            "disk": Held(self._disk.used_bytes, self._disk.num_evictions),
        }

    @property
    def host_used_bytes(self) -> int:
        return self._host.used_bytes

    @property
    def disk_used_bytes(self) -> int:
        return self._disk.used_bytes

    def lease(self, digest: str, deadline_s: float | None = None, cancel: Cancellation | None = None) -> Lease:
        """Hold an adapter in host memory. Raises AdapterUnavailable or AdapterCorrupt.

        Callers that ask for one adapter at a time share one load; the first reads what the disk tier has itself, to its
        end. Where others read, or it comes from the blob store, a caller leaves the load after `deadline_s` seconds
        with AdapterUnavailable, or with LoadCancelled once `cancel` is given; the others do not notice. When the last
        has left, the load ends after the part that it is at: a packed file that it was getting goes to the disk tier.
        """
        _check_digest(digest)
        if cancel is not None and cancel.is_cancelled:
            raise _cancelled(digest)
        due_s = None if deadline_s is None else time.monotonic() + deadline_s
        woken = threading.Event()
        with self._lock:
            started_s = time.perf_counter()
            packed = self._host.lease(digest)
            self.figures.count_stage("host", "lookup", 0, time.perf_counter() - started_s)
            self.figures.count_lookup("host", packed is not None)
            if packed is not None:
                return Lease(packed, self.release)
            load, begins = self._load(digest)
            load.waiters.add(woken)
        # Waking another thread would take longer than reading a small file.
        if begins and not self._try(digest, load, self._source.from_disk):
            self._submit(digest, load)
        if cancel is not None:
            cancel.when_cancelled(woken.set)
        woken.wait(None if due_s is None else min(max(0.0, due_s - time.monotonic()), threading.TIMEOUT_MAX))
        with self._lock:
            if not load.is_through:
                load.waiters.discard(woken)
        # Whoever left did so under the lock: a load that is through by then has counted this lease.
        if load.is_through and woken in load.waiters:
            return Lease(load.result(), self.release)
        if cancel is not None and cancel.is_cancelled:
            raise _cancelled(digest)
        raise AdapterUnavailable(f"adapter {digest[:12]} was not loaded within {deadline_s} s")

    def contents(self) -> tuple[TierContents, ...]:
        """What both bounded tiers hold; reads no file."""
        with self._lock:
            host = self._host.contents()
        return (host, self._disk.contents())

    def release(self, digest: str) -> None:
        """Give one lease back; `Lease.release` calls this."""
        with self._lock:
            self._host.release(digest)

    def _load(self, digest: str) -> tuple[SharedLoad, bool]:
        """The load of the adapter that is under way, or a new one, which the caller has to begin: then True."""
        load = self._loads.get(digest)
        if load is not None:
            return load, False
        load = self._loads[digest] = SharedLoad()
        return load, True

    def _submit(self, digest: str, load: SharedLoad) -> None:
        """Have a thread of ours bring an adapter from the blob store."""
        try:
            self._loaders.submit(self._try, digest, load, self._source.from_blobs)
        except RuntimeError:
            # The process ends, or may have no more threads; what was queued all the same finds that it is through.
            self._end(digest, load, None, AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded any more"))

    def _try(self, digest: str, load: SharedLoad, way: _Way) -> bool:
        """Bring an adapter into host memory one way; False where that leads to nothing and the load goes on."""
        if load.is_through:
            return True

        def allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
            with self._lock:
                load.num_reserved_bytes += num_bytes
                self._host.reserve(num_bytes)
            return self._allocate(num_bytes)

        def check_wanted() -> None:
            with self._lock:
                if not load.is_wanted:
                    # Whoever asks from now on begins anew.
                    del self._loads[digest]
                    raise LoadCancelled

        packed: PackedAdapter | None = None
        error: BaseException | None = None
        try:
            with self.figures.of_load(digest):
                packed = way(digest, allocate, check_wanted)
        except BlobStoreUnavailable as failure:
            error = AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded: {failure}")
            error.__cause__ = failure
        except StoreError as failure:
            error = failure
        except BaseException as failure:
            # Whatever goes wrong must reach those who wait; of files it says no names.
            what = failure.strerror if isinstance(failure, OSError) else type(failure).__name__
            error = AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded: {what}")
            error.__cause__ = failure
        if packed is None and error is None:
            return False
        self._end(digest, load, packed, error)
        return True

    def _end(self, digest: str, load: SharedLoad, packed: PackedAdapter | None, error: BaseException | None) -> None:
        with self._lock:
            self._host.unreserve(load.num_reserved_bytes)
            if not isinstance(error, LoadCancelled):
                del self._loads[digest]
            if packed is not None and load.is_wanted:
                self._host.add(packed, len(load.waiters))
            load.packed, load.error, load.is_through = packed, error, True
            waiters = list(load.waiters)
        if isinstance(error, LoadCancelled) or not load.is_wanted:
            self.figures.count_end("given_up")
        else:
            self.figures.count_end("failed" if packed is None else "loaded")
        for waiter in waiters:
            waiter.set()


def _cancelled(digest: str) -> LoadCancelled:
    return LoadCancelled(f"adapter {digest[:12]} is no longer wanted")


def _check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise AdapterUnavailable("what was asked for is no digest")

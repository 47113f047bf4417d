"""Where the engine gets packed adapters: host memory, else the local disk, else the blob store."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from loramux.adapter_store.blobs import BlobStore, canonical_key, packed_key
from loramux.adapter_store.canonical import digest_of
from loramux.adapter_store.disk_tier import DiskTier
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterUnavailable,
    BlobNotFound,
    BlobStoreUnavailable,
)
from loramux.adapter_store.host_tier import HostTier
from loramux.adapter_store.packed_file import HostMemory, plain_memory, read_packed, write_packed
from loramux.adapter_store.packing import PackedAdapter, pack
from loramux.adapter_store.target import PackTarget

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CANONICAL_ATTEMPTS = 2


class Lease:
    """A counted hold on an adapter in host memory; release it once, or leave its `with` block."""

    __slots__ = ("_is_released", "_store", "packed")

    def __init__(self, store: TieredStore, packed: PackedAdapter) -> None:
        self.packed = packed
        self._store = store
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._store.release(self.packed.digest)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class TieredStore:
    """Leases packed adapters by digest. Blocking and thread-safe: call it from loader threads.

    Both bounded tiers evict the least recently used first and never what is leased. Bytes are verified before their
    first use; wrong ones are set aside and had again from further away. A packed file that is missing or wrong in the
    blob store is rebuilt from the canonical file. Packed adapters lie in memory from `allocate`.
    """

    def __init__(
        self,
        blobs: BlobStore,
        target: PackTarget,
        disk_dir: Path,
        disk_bytes: int,
        host_bytes: int,
        allocate: HostMemory = plain_memory,
    ) -> None:
        self._blobs = blobs
        self._target = target
        self._pack_key = target.pack_key
        self._disk = DiskTier(disk_dir, disk_bytes, self._pack_key)
        self._host = HostTier(host_bytes)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}

    @property
    def host_used_bytes(self) -> int:
        return self._host.used_bytes

    @property
    def disk_used_bytes(self) -> int:
        return self._disk.used_bytes

    def lease(self, digest: str) -> Lease:
        """Hold an adapter in host memory. Raises AdapterUnavailable or AdapterCorrupt.

        Callers that ask for one adapter at a time share one load.
        """
        if not _DIGEST.fullmatch(digest):
            raise AdapterUnavailable(f"{digest!r} is not a digest")
        with self._lock:
            packed = self._host.lease(digest)
            if packed is not None:
                return Lease(self, packed)
            load = self._loads.get(digest)
            if load is not None:
                load.num_waiters += 1
            else:
                own = self._loads[digest] = _Load()
        if load is not None:
            return Lease(self, load.wait())
        return self._load(digest, own)

    def release(self, digest: str) -> None:
        """Give one lease back; `Lease.release` calls this."""
        with self._lock:
            self._host.release(digest)

    def _load(self, digest: str, load: _Load) -> Lease:
        try:
            load.packed = self._fetch(digest)
        except BaseException as error:
            load.error = error
            raise
        finally:
            with self._lock:
                del self._loads[digest]
                if load.packed is not None:
                    self._host.add(load.packed, 1 + load.num_waiters)
            load.is_done.set()
        return Lease(self, load.packed)

    def _fetch(self, digest: str) -> PackedAdapter:
        try:
            return self._from_disk(digest) or self._from_blobs(digest)
        except (BlobStoreUnavailable, OSError) as error:
            raise AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded: {error}") from error

    def _from_disk(self, digest: str) -> PackedAdapter | None:
        path = self._disk.hold(digest)
        if path is None:
            return None
        try:
            return self._read(path, digest)
        except (AdapterCorrupt, FileNotFoundError):
            self._disk.forget(digest)
            return None
        finally:
            self._disk.release(digest)

    def _from_blobs(self, digest: str) -> PackedAdapter:
        key = packed_key(digest, self._pack_key)
        file = self._disk.new_file()
        try:
            self._blobs.get(key, file)
            packed = self._read(file, digest)
        except BlobNotFound:
            return self._rebuild(digest)
        except AdapterCorrupt:
            self._disk.set_aside(file)
            self._blobs.delete(key)
            return self._rebuild(digest)
        else:
            self._disk.add(digest, file)
            return packed
        finally:
            file.unlink(missing_ok=True)

    def _read(self, file: Path, digest: str) -> PackedAdapter:
        return read_packed(file, self._target, digest, self._allocate)

    def _rebuild(self, digest: str) -> PackedAdapter:
        """Pack an adapter for our target and give the packed file to the blob store too."""
        canonical, file = self._disk.new_file(), self._disk.new_file()
        try:
            self._get_canonical(digest, canonical)
            write_packed(file, pack(canonical, self._target), self._target)
            packed = self._read(file, digest)
            # The adapter can be served without it; the next engine will try again.
            with suppress(BlobStoreUnavailable):
                self._blobs.put(packed_key(digest, self._pack_key), file)
            self._disk.add(digest, file)
        except AdapterRejected as error:
            raise AdapterUnavailable(f"adapter {digest[:12]} does not fit the served base model") from error
        finally:
            canonical.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        return packed

    def _get_canonical(self, digest: str, destination: Path) -> None:
        for _ in range(_CANONICAL_ATTEMPTS):
            try:
                self._blobs.get(canonical_key(digest), destination)
            except BlobNotFound:
                raise AdapterUnavailable(f"the blob store does not hold adapter {digest[:12]}") from None
            if digest_of(destination) == digest:
                return
            self._disk.set_aside(destination)
        raise AdapterCorrupt(f"the blob store holds wrong bytes for adapter {digest[:12]}")


class _Load:
    """One load in progress; others who want the adapter wait for it."""

    def __init__(self) -> None:
        self.num_waiters = 0
        self.packed: PackedAdapter | None = None
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def wait(self) -> PackedAdapter:
        self.is_done.wait()
        if self.packed is not None:
            return self.packed
        # Each waiter raises its own exception: a traceback belongs to one thread.
        if isinstance(self.error, AdapterCorrupt):
            raise AdapterCorrupt(str(self.error)) from self.error
        raise AdapterUnavailable(str(self.error)) from self.error

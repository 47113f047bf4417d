"""An adapter's packed file from the local disk, the blob store, or made anew; verified before it is used."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterUnavailable,
    BlobNotFound,
    BlobStoreUnavailable,
)
from loramux.adapter_store.formats.canonical import digest_of
from loramux.adapter_store.formats.checksums import PayloadCheck, Proof
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packed_file import HostMemory, read_open_packed, write_packed
from loramux.adapter_store.formats.packing import PackedAdapter, pack
from loramux.adapter_store.tiers.disk_tier import DiskTier, HeldFile
from loramux.adapter_store.tiers.tier_figures import Tier, TierFigures

_CANONICAL_ATTEMPTS = 2
_MAX_PROOFS = 1 << 14


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Differs where a file was replaced or written to."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class PackedSource:
    """Reads packed adapters for one target. Thread-safe; each call is for another digest than those under way.

    What is verified, and when:

    - a canonical file, whenever it comes from the blob store: its SHA-256 is the digest;
    - a packed file's header, at each read: its SHA-256;
    - a packed file's pages, at the first read of a file by this engine, also of one that an earlier run or another
      engine left on the disk: their SHA-256, which the header states;
    - at later reads of a file that has the same inode, size and time of its last change: lane sums, noted at the first.

    Always what is verified is what lies in memory, after it was read. Wrong bytes are set aside and had from further
    away, and a packed file that is missing or wrong in the blob store is rebuilt from the canonical one.
    """

    def __init__(self, blobs: BlobStore, target: PackTarget, disk: DiskTier, figures: TierFigures) -> None:
        self._blobs = blobs
        self._target = target
        self._pack_key = target.pack_key
        self._disk = disk
        self._figures = figures
        self._lock = threading.Lock()
        self._proofs: OrderedDict[str, tuple[FileIdentity, Proof]] = OrderedDict()

    def from_disk(self, digest: str, allocate: HostMemory, check_wanted: Callable[[], None]) -> PackedAdapter | None:
        """An adapter in memory from `allocate`; None where the disk tier has none, or had wrong bytes."""
        check_wanted()
        with self._figures.timed("disk", "lookup"):
            held = self._hold(digest)
        self._figures.count_lookup("disk", held is not None)
        if held is None:
            return None
        with held:
            try:
                return self._read(held.descriptor, held.status, digest, allocate, "disk")
            except (AdapterCorrupt, OSError):
                self._figures.count_end("set_aside")
                with suppress(OSError):
                    self._disk.forget(digest, held.status.st_ino)
        return None

    def from_blobs(self, digest: str, allocate: HostMemory, check_wanted: Callable[[], None]) -> PackedAdapter:
        """An adapter in memory from `allocate`.

        Between its parts it calls `check_wanted`, whose exception ends it; a packed file that has come by then stays on
        the disk. Raises AdapterUnavailable, AdapterCorrupt, BlobStoreUnavailable or OSError.
        """
        check_wanted()
        key = packed_key(digest, self._pack_key)
        file = self._disk.new_file()
        try:
            try:
                self._get(key, file)
                self._keep_unless(check_wanted, digest, file)
                packed = self._read_path(file, digest, allocate)
            except BlobNotFound:
                return self._rebuild(digest, allocate, check_wanted)
            except AdapterCorrupt:
                # The store's own checks may have found it, or ours.
                self._set_aside(file)
                self._blobs.delete(key)
                return self._rebuild(digest, allocate, check_wanted)
            self._keep(digest, file)
            return packed
        finally:
            file.unlink(missing_ok=True)

    def _hold(self, digest: str) -> HeldFile | None:
        try:
            return self._disk.hold(digest)
        except OSError:
            # A file that cannot be opened is as good as none.
            return None

    def _rebuild(self, digest: str, allocate: HostMemory, check_wanted: Callable[[], None]) -> PackedAdapter:
        """Pack an adapter for our target and give the packed file to the blob store too."""
        check_wanted()
        canonical, file = self._disk.new_file(), self._disk.new_file()
        try:
            self._get_canonical(digest, canonical)
            check_wanted()
            with self._figures.timed("blobs", "pack", canonical.stat().st_size):
                write_packed(file, pack(canonical, self._target), self._target)
            packed = self._read_path(file, digest, allocate)
            # The adapter can be served without it; the next engine will try again.
            with suppress(BlobStoreUnavailable):
                self._blobs.put(packed_key(digest, self._pack_key), file)
            self._keep(digest, file)
        except AdapterRejected as error:
            raise AdapterUnavailable(f"adapter {digest[:12]} does not fit the served base model") from error
        finally:
            canonical.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        return packed

    def _get(self, key: str, file: Path) -> None:
        with self._figures.timed("blobs", "fetch") as stage:
            try:
                self._blobs.get(key, file)
            except BlobNotFound:
                self._figures.count_lookup("blobs", False)
                raise
            stage.num_bytes = file.stat().st_size
        self._figures.count_lookup("blobs", True)

    def _get_canonical(self, digest: str, destination: Path) -> None:
        for _ in range(_CANONICAL_ATTEMPTS):
            try:
                self._get(canonical_key(digest), destination)
            except BlobNotFound:
                raise AdapterUnavailable(f"the blob store does not hold adapter {digest[:12]}") from None
            with self._figures.timed("blobs", "verify", destination.stat().st_size):
                is_right = digest_of(destination) == digest
            if is_right:
                return
            self._set_aside(destination)
        raise AdapterCorrupt(f"the blob store holds wrong bytes for adapter {digest[:12]}")

    def _read_path(self, path: Path, digest: str, allocate: HostMemory) -> PackedAdapter:
        with path.open("rb", buffering=0) as file:
            return self._read(file.fileno(), os.fstat(file.fileno()), digest, allocate, "blobs")

    def _read(
        self, descriptor: int, status: os.stat_result, digest: str, allocate: HostMemory, verifies: Tier
    ) -> PackedAdapter:
        identity = FileIdentity.of(status)
        with self._lock:
            known = self._proofs.pop(digest, None)
        check = PayloadCheck(known[1] if known is not None and known[0] == identity else None)
        packed = read_open_packed(descriptor, status, check, self._target, digest, allocate)
        assert check.proof is not None
        with self._lock:
            self._proofs[digest] = (identity, check.proof)
            if len(self._proofs) > _MAX_PROOFS:
                self._proofs.popitem(last=False)
        self._figures.count_stage("disk", "read", packed.payload.nbytes, check.read_s)
        self._figures.count_stage(verifies, "verify", packed.payload.nbytes, check.verify_s)
        return packed

    def _keep_unless(self, check_wanted: Callable[[], None], digest: str, file: Path) -> None:
        """Where nobody wants the adapter any more, keep what has come all the same."""
        try:
            check_wanted()
        except BaseException:
            self._keep(digest, file)
            raise

    def _keep(self, digest: str, file: Path) -> None:
        # Without a place on the disk the adapter can be served all the same.
        with suppress(OSError):
            self._disk.add(digest, file)

    def _set_aside(self, file: Path) -> None:
        self._figures.count_end("set_aside")
        # Whether or not there is room to keep it, it is not used.
        with suppress(OSError):
            self._disk.set_aside(file)

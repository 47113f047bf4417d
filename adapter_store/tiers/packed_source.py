"""Loads an adapter's packed file from the local disk or the blob store, or packs it again, and verifies it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore, canonical_key, packed_key
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterUnavailable,
    BlobNotFound,
    BlobStoreUnavailable,
    LoadCancelled,
    PackedForOtherBase,
    StoreError,
)
from loramux.adapter_store.formats.files.checksums import PayloadCheck
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import HostMemory, plain_memory, read_open_packed, write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.tiers.disk_tier import DiskTier, HeldFile
from loramux.adapter_store.tiers.tier_figures import Held, PassedStage, Tier, TierFigures

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CANONICAL_ATTEMPTS = 2
_MAX_DOWNLOADS = 64
"""Maximum number of download threads, including threads of abandoned downloads that still wait for the blob store."""


@dataclass(slots=True, eq=False)
class _Download:
    """A download, and the cancellation of the fetch that waits for it. PackedSource's lock guards both fields."""

    cancellation: Cancellation
    stages: list[PassedStage]


class PackedSource:
    """Loads packed adapters for one target from disk, or from the blob store if they are not on disk. Thread-safe.

    Concurrent fetches of one adapter are correct but duplicate work, so an engine runs only one at a time. If it
    requests an adapter again after a cancellation, the new fetch takes over the running download, so downloads do not
    accumulate.

    The following is verified:

    - a canonical file, whenever it is downloaded: its SHA-256, which is the digest;
    - a packed file's header, at each read: its SHA-256;
    - a packed file's pages, at each read: their lane sums, which the header states.

    The check always covers the bytes in memory after the read. A corrupt file is set aside and downloaded again. If the
    blob store's packed file is missing or corrupt, it is rebuilt from the canonical file.

    If an adapter depends on the base's weights, as a DoRA adapter does, the key of its packed file ends with the first
    16 digits of the fingerprint of these weights. The file's header contains the whole fingerprint, and a file for
    another base is never used.
    """

    def __init__(
        self,
        blobs: BlobStore,
        disk: DiskTier,
        target: PackTarget,
        base: BaseWeights,
        allocate: HostMemory = plain_memory,
    ) -> None:
        self._blobs = blobs
        self._base = base
        self._target = target
        self._pack_key = target.pack_key
        self.disk = disk
        self._allocate = allocate
        self.figures = TierFigures(
            held=lambda: {"disk": Held(disk.used_bytes, disk.num_evictions)}, breaker=lambda: blobs.breaker_state
        )
        self._lock = threading.Lock()
        # Downloads run on their own threads, so that a cancelled fetch can return although its download is stuck.
        self._downloads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="download")
        self._running: dict[str, tuple[_Download, Future[PackedAdapter]]] = {}

    def fetch(self, digest: str, cancellation: Cancellation) -> PackedAdapter:
        """Load an adapter into memory from `allocate`. Blocks. Raises AdapterUnavailable or AdapterCorrupt.

        A read from disk runs to completion on the caller's thread. A fetch that is cancelled while it waits for the
        blob store raises LoadCancelled immediately. The download stops after its current step, but if it was fetching a
        packed file, it still stores that file on disk.
        """
        if not _DIGEST.fullmatch(digest):
            raise AdapterUnavailable("the requested digest is malformed")
        _check_wanted(digest, cancellation)
        try:
            packed = self._from_disk(digest)
            if packed is None:
                packed = self._await_download(digest, cancellation)
        except LoadCancelled:
            self.figures.count_end("given_up")
            raise
        except BaseException as failure:
            self.figures.count_end("failed")
            if isinstance(failure, StoreError) and not isinstance(failure, BlobStoreUnavailable):
                raise
            # For an OSError, do not reveal file names.
            what = failure.strerror if isinstance(failure, OSError) else type(failure).__name__
            reason = str(failure) if isinstance(failure, BlobStoreUnavailable) else what
            raise AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded: {reason}") from failure
        self.figures.count_end("loaded")
        return packed

    def _await_download(self, digest: str, cancellation: Cancellation) -> PackedAdapter:
        download, downloading = self._join(digest, cancellation) or self._start(digest, cancellation)
        woken = threading.Event()
        downloading.add_done_callback(lambda _: woken.set())
        cancellation.when_cancelled(woken.set)
        woken.wait()
        with self._lock:
            is_taken_over = download.cancellation is not cancellation
        if is_taken_over or not downloading.done():
            raise _cancelled(digest)
        try:
            return downloading.result()
        finally:
            if self.figures.noted is not None:
                self.figures.noted.extend(download.stages)
            # Avoid a reference cycle: the failure's traceback refers to this frame.
            del downloading

    def _join(self, digest: str, cancellation: Cancellation) -> tuple[_Download, Future[PackedAdapter]] | None:
        """Take over the running download of a cancelled fetch, or return None if there is none."""
        with self._lock:
            running = self._running.get(digest)
            if running is None or not running[0].cancellation.is_cancelled:
                return None
            running[0].cancellation = cancellation
            return running

    def _start(self, digest: str, cancellation: Cancellation) -> tuple[_Download, Future[PackedAdapter]]:
        download = _Download(cancellation, [])

        def check_wanted() -> None:
            with self._lock:
                if download.cancellation.is_cancelled:
                    # This download is ending, so no later fetch may join it.
                    self._forget(digest, download)
                    raise _cancelled(digest)

        def run() -> PackedAdapter:
            try:
                with self.figures.noting(download.stages):
                    return self._from_blobs(digest, check_wanted)
            finally:
                with self._lock:
                    self._forget(digest, download)

        with self._lock:
            try:
                downloading = self._downloads.submit(run)
            except RuntimeError as error:
                # No thread could be started, but the download is queued anyway. Cancel it so that it stops if it ever
                # runs.
                cancellation.cancel()
                raise AdapterUnavailable(f"adapter {digest[:12]} cannot be loaded: no thread can start") from error
            self._running[digest] = download, downloading
        return download, downloading

    def _forget(self, digest: str, download: _Download) -> None:
        running = self._running.get(digest)
        if running is not None and running[0] is download:
            del self._running[digest]

    def _from_disk(self, digest: str) -> PackedAdapter | None:
        """Return the adapter, or None if the disk tier has no such file or if the file is corrupt."""
        with self.figures.timed("disk", "lookup"):
            held = self._hold(digest)
        self.figures.count_lookup("disk", held is not None)
        if held is None:
            return None
        with held:
            try:
                return self._read(held.descriptor, held.status, digest, "disk")
            except PackedForOtherBase:
                # An engine with the other base may use the file. This engine's download replaces it.
                return None
            except (AdapterCorrupt, OSError):
                self.figures.count_end("set_aside")
                with suppress(OSError):
                    self.disk.forget(digest, held.status.st_ino)
        return None

    def _from_blobs(self, digest: str, check_wanted: Callable[[], None]) -> PackedAdapter:
        """Download an adapter. `check_wanted` is called between steps, and its exception stops the download.

        Raises AdapterUnavailable, AdapterCorrupt, BlobStoreUnavailable or OSError.
        """
        check_wanted()
        packed = self._from_key(packed_key(digest, self._pack_key), digest, check_wanted)
        if packed is None and (fingerprint := self._fingerprint) is not None:
            check_wanted()
            packed = self._from_key(packed_key(digest, self._pack_key, fingerprint), digest, check_wanted)
        return self._rebuild(digest, check_wanted) if packed is None else packed

    def _from_key(self, key: str, digest: str, check_wanted: Callable[[], None]) -> PackedAdapter | None:
        """Download a packed file. Return None if it is missing, or if it was corrupt and has been deleted."""
        file = self.disk.new_file()
        try:
            try:
                self._get(key, file)
                self._keep_unless(check_wanted, digest, file)
                packed = self._read_path(file, digest)
            except BlobNotFound:
                return None
            except AdapterCorrupt:
                # Either the blob store's checks or the checks of this class found wrong bytes.
                self._set_aside(file)
                self._blobs.delete(key)
                return None
            self._keep(digest, file)
            return packed
        finally:
            file.unlink(missing_ok=True)

    @property
    def _fingerprint(self) -> str | None:
        """The fingerprint of the base's weights, or None if they cannot be read."""
        try:
            return self._base.fingerprint
        except AdapterUnavailable:
            # If an adapter depends on the weights, packing it reports the reason.
            return None

    def _hold(self, digest: str) -> HeldFile | None:
        try:
            return self.disk.hold(digest)
        except OSError:
            # Treat a file that cannot be opened as missing.
            return None

    def _rebuild(self, digest: str, check_wanted: Callable[[], None]) -> PackedAdapter:
        """Pack an adapter for this target, and store the packed file in the blob store and on disk."""
        check_wanted()
        canonical, file = self.disk.new_file(), self.disk.new_file()
        try:
            self._get_canonical(digest, canonical)
            check_wanted()
            with self.figures.timed("blobs", "pack", canonical.stat().st_size):
                write_packed(file, pack(canonical, self._target, self._base), self._target)
            packed = self._read_path(file, digest)
            # The adapter can be served without this blob, and the next engine will try again.
            with suppress(BlobStoreUnavailable):
                self._blobs.put(packed_key(digest, self._pack_key, packed.base), file)
            self._keep(digest, file)
        except AdapterRejected as error:
            raise AdapterUnavailable(f"adapter {digest[:12]} does not fit the served base model: {error}") from error
        finally:
            canonical.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        return packed

    def _get(self, key: str, file: Path) -> None:
        with self.figures.timed("blobs", "fetch") as stage:
            try:
                self._blobs.get(key, file)
            except BlobNotFound:
                self.figures.count_lookup("blobs", False)
                raise
            stage.num_bytes = file.stat().st_size
        self.figures.count_lookup("blobs", True)

    def _get_canonical(self, digest: str, destination: Path) -> None:
        for _ in range(_CANONICAL_ATTEMPTS):
            try:
                self._get(canonical_key(digest), destination)
            except BlobNotFound:
                raise AdapterUnavailable(f"the blob store does not contain adapter {digest[:12]}") from None
            with self.figures.timed("blobs", "verify", destination.stat().st_size):
                is_right = digest_of(destination) == digest
            if is_right:
                return
            self._set_aside(destination)
        raise AdapterCorrupt(f"the blob store has wrong bytes for adapter {digest[:12]}")

    def _read_path(self, path: Path, digest: str) -> PackedAdapter:
        with path.open("rb", buffering=0) as file:
            return self._read(file.fileno(), os.fstat(file.fileno()), digest, "blobs")

    def _read(self, descriptor: int, status: os.stat_result, digest: str, verifies: Tier) -> PackedAdapter:
        check = PayloadCheck()
        packed = read_open_packed(descriptor, status, check, self._target, digest, self._allocate)
        if packed.base is not None and packed.base != self._base.fingerprint:
            raise PackedForOtherBase("the adapter was packed for a base with other weights")
        self.figures.count_stage("disk", "read", packed.payload.nbytes, check.read_s)
        self.figures.count_stage(verifies, "verify", packed.payload.nbytes, check.verify_s)
        return packed

    def _keep_unless(self, check_wanted: Callable[[], None], digest: str, file: Path) -> None:
        """Call `check_wanted`. If it raises, keep the downloaded file on disk anyway."""
        try:
            check_wanted()
        except BaseException:
            self._keep(digest, file)
            raise

    def _keep(self, digest: str, file: Path) -> None:
        # The adapter can be served even if the disk has no room for it.
        with suppress(OSError):
            self.disk.add(digest, file)

    def _set_aside(self, file: Path) -> None:
        self.figures.count_end("set_aside")
        # Never use the file, even if there is no room to set it aside.
        with suppress(OSError):
            self.disk.set_aside(file)


def _check_wanted(digest: str, cancellation: Cancellation) -> None:
    if cancellation.is_cancelled:
        raise _cancelled(digest)


def _cancelled(digest: str) -> LoadCancelled:
    return LoadCancelled(f"adapter {digest[:12]} is no longer wanted")

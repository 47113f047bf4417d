"""The staging process of one engine: `python -m loramux.adapter_store.tiers.staging_process SOCKET MEMORY`.

It brings packed adapters from the local disk, or out of the blob store, into memory that it shares with the engine, and
verifies them there. So what that takes, an S3 client above all, never takes the interpreter's lock from the thread of
the engine's steps. Both arguments are descriptors; it ends when the engine's end of the socket closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import InvalidBlobUrl, StoreError
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.host_slab import HostSlab, mapped, shared_memory
from loramux.adapter_store.tiers.leases import Lease
from loramux.adapter_store.tiers.load_timelines import LoadTimelines, PassedStage
from loramux.adapter_store.tiers.staging_messages import (
    MAX_MESSAGE_CHARS,
    MAX_PACKET_BYTES,
    Cancel,
    Failed,
    FromStaging,
    Look,
    Looked,
    Occupied,
    Opened,
    Ping,
    Pong,
    Refused,
    Release,
    Stage,
    Staged,
    StagingConfig,
    decode_config,
    decode_to_staging,
    encode,
)
from loramux.adapter_store.tiers.tier_figures import TierFigures, without_host
from loramux.adapter_store.tiers.tiered_store import TieredStore


class StagingServer:
    """Answers one engine. What it gives out it holds until it comes back, by the numbers of the engine's requests."""

    def __init__(self, end: socket.socket, store: TieredStore, slab: HostSlab, num_threads: int) -> None:
        self._end = end
        self._store = store
        self._slab = slab
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="staging")
        # Who looks does not wait for a blob store.
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="looking")
        self._sending = threading.Lock()
        # Leases, and pieces that an earlier process gave out.
        self._given_out: dict[int, Lease | npt.NDArray[np.uint8]] = {}
        # By where they begin, until the first request comes.
        self._inherited: dict[int, npt.NDArray[np.uint8]] = {}
        self._under_way: dict[int, Cancellation] = {}

    def serve(self) -> None:
        """Tell that the tiers are open, and run until the engine is gone."""
        self._send(Opened(self._counts()))
        while packet := self._end.recv(MAX_PACKET_BYTES):
            match decode_to_staging(packet):
                case Occupied(pieces=pieces):
                    self._occupy(pieces)
                case Stage(number=number, digest=digest):
                    self._inherited.clear()
                    cancellation = self._under_way[number] = Cancellation()
                    self._threads.submit(self._stage, number, digest, cancellation)
                case Cancel(number=number):
                    cancelled = self._under_way.get(number)
                    if cancelled is not None:
                        cancelled.cancel()
                case Release(numbers=numbers):
                    for number in numbers:
                        self._take_back(number)
                case Look():
                    self._looking.submit(self._look)
                case Ping():
                    self._send(Pong())

    def _occupy(self, pieces: tuple[tuple[int, int, int], ...]) -> None:
        for number, begin, num_bytes in pieces:
            # One adapter may have been given out twice.
            if begin not in self._inherited:
                self._inherited[begin] = self._slab.occupy(begin, num_bytes)
            self._given_out[number] = self._inherited[begin]

    def _stage(self, number: int, digest: str, cancellation: Cancellation) -> None:
        timelines = self._store.figures.timelines
        assert timelines is not None
        timelines.begin(digest)
        try:
            self._give_out(number, self._store.lease(digest, cancel=cancellation))
        except StoreError as error:
            self._send(Failed(number, str(error)[:MAX_MESSAGE_CHARS], self._stages(digest), self._counts()))
        except Exception as error:
            # Whatever else goes wrong must still reach the requests that wait for this adapter.
            message = f"loading failed: {type(error).__name__}"
            self._send(Failed(number, message, self._stages(digest), self._counts()))
        finally:
            self._under_way.pop(number, None)

    def _give_out(self, number: int, lease: Lease) -> None:
        try:
            staged = self._staged(number, lease.packed)
            if staged.begin is None:
                with lease, _memory_of(lease.packed.payload.reshape(-1)) as descriptor:
                    self._send(staged, descriptor)
                return
        except BaseException:
            lease.release()
            raise
        self._given_out[number] = lease
        # The engine may give it back at once, and then nothing here may hold it.
        del lease
        try:
            self._send(staged)
        except BaseException:
            self._take_back(number)
            raise

    def _staged(self, number: int, packed: PackedAdapter) -> Staged:
        return Staged(
            number,
            self._slab.offset_of(packed.payload),
            packed.layout.ranks.tobytes(),
            packed.layout.outer_ranks.tobytes(),
            packed.scales.tobytes(),
            packed.outer_scales.tobytes(),
            self._stages(packed.digest),
            self._counts(),
        )

    def _take_back(self, number: int) -> None:
        given_out = self._given_out.pop(number)
        if isinstance(given_out, Lease):
            given_out.release()

    def _stages(self, digest: str) -> tuple[PassedStage, ...]:
        timelines = self._store.figures.timelines
        timeline = None if timelines is None else timelines.take(digest)
        # The host tier is the engine's; ours keeps nothing.
        return () if timeline is None else tuple(one for one in timeline.stages if one.tier != "host")

    def _look(self) -> None:
        (disk,) = (one for one in self._store.contents() if one.tier == "disk")
        try:
            with _memory_of(np.frombuffer(encode(disk), np.uint8)) as descriptor:
                self._send(Looked(self._counts()), descriptor)
        except OSError:
            self._send(Looked(self._counts()))

    def _counts(self) -> msgspec.Raw:
        return msgspec.Raw(encode(without_host(self._store.figures.snapshot())))

    def _send(self, message: FromStaging, *descriptors: int) -> None:
        # Where the engine is gone, `serve` ends the process.
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._end, [encode(message)], descriptors)


@contextmanager
def _memory_of(content: npt.NDArray[np.uint8]) -> Iterator[int]:
    """The descriptor of memory with this content, which whoever gets it keeps."""
    descriptor = shared_memory(content.size)
    try:
        mapped(descriptor)[:] = content
        yield descriptor
    finally:
        os.close(descriptor)


def main() -> None:
    # Ctrl-C reaches the whole terminal group; the engine decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    code = 0
    try:
        packet = end.recv(MAX_PACKET_BYTES)
        if packet:
            _serve(end, HostSlab(mapped(int(sys.argv[2]))), decode_config(packet))
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        # Threads that wait for a blob store are not waited for.
        os._exit(code)


def _serve(end: socket.socket, slab: HostSlab, config: StagingConfig) -> None:
    try:
        store = TieredStore(
            open_blob_store(config.blob_url),
            PackTarget.from_document(config.target),
            Path(config.disk_dir),
            config.disk_bytes,
            host_bytes=0,
            allocate=slab.allocate,
            figures=TierFigures(LoadTimelines()),
        )
    except InvalidBlobUrl as error:
        end.send(encode(Refused(str(error))))
        return
    except OSError as error:
        message = (
            f"the disk tier's directory cannot be used ({error.strerror or error}): give another "
            "disk_tier_dir, on a disk of this host that this user may write to"
        )
        end.send(encode(Refused(message)))
        return
    with suppress(ConnectionResetError):
        StagingServer(end, store, slab, config.num_threads).serve()


if __name__ == "__main__":
    main()

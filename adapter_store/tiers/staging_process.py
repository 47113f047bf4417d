"""The staging process of one engine: `python -m loramux.adapter_store.tiers.staging_process SOCKET MEMORY`.

It loads packed adapters from the local disk or the blob store into memory shared with the engine, and verifies them
there. In the engine's own process, this work, especially that of S3 clients, would compete for the GIL with the thread
that runs the engine's steps. Both arguments are file descriptors. The process exits when the engine closes its end of
the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.cancellation import Cancellation
from loramux.adapter_store.errors import StoreError
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.tiers.host_slab import HostSlab, mapped, shared_memory
from loramux.adapter_store.tiers.packed_source import PackedSource
from loramux.adapter_store.tiers.staged_tables import compress, table_bytes
from loramux.adapter_store.tiers.staging_messages import (
    MAX_MESSAGE_CHARS,
    MAX_PACKET_BYTES,
    MAX_TABLE_BYTES,
    Cancel,
    Failed,
    FromStaging,
    Look,
    Looked,
    Occupied,
    Opened,
    Ping,
    Pong,
    Purge,
    Purged,
    Refused,
    Release,
    Stage,
    Staged,
    StagingConfig,
    decode_config,
    decode_to_staging,
    encode,
)
from loramux.adapter_store.tiers.tier_figures import PassedStage


class StagingServer:
    """Serves one engine. The shared memory of an adapter stays allocated until the engine releases it."""

    def __init__(self, end: socket.socket, source: PackedSource, slab: HostSlab, num_threads: int) -> None:
        self._end = end
        self._source = source
        self._slab = slab
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="staging")
        # A separate pool, so that `Look` and `Purge` do not wait for the blob store.
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="looking")
        self._sending = threading.Lock()
        # Allocated pieces, by offset. Some may have been allocated by an earlier staging process.
        self._given_out: dict[int, npt.NDArray[np.uint8]] = {}
        self._under_way: dict[int, Cancellation] = {}

    def serve(self) -> None:
        """Report that the tiers are open, then serve requests until the engine is gone."""
        self._send(Opened(self._counts()))
        while packet := self._end.recv(MAX_PACKET_BYTES):
            match decode_to_staging(packet):
                case Occupied(pieces=pieces):
                    for begin, num_bytes in pieces:
                        self._given_out[begin] = self._slab.occupy(begin, num_bytes)
                case Stage(number=number, digest=digest):
                    cancellation = self._under_way[number] = Cancellation()
                    self._threads.submit(self._stage, number, digest, cancellation)
                case Cancel(number=number):
                    cancelled = self._under_way.get(number)
                    if cancelled is not None:
                        cancelled.cancel()
                case Release(begins=begins):
                    for begin in begins:
                        del self._given_out[begin]
                case Look():
                    self._looking.submit(self._look)
                case Purge(digest=digest):
                    self._looking.submit(self._purge, digest)
                case Ping():
                    self._send(Pong())

    def _stage(self, number: int, digest: str, cancellation: Cancellation) -> None:
        stages: list[PassedStage] = []
        try:
            with self._source.figures.noting(stages):
                packed = self._source.fetch(digest, cancellation)
            tables, payload = table_bytes(packed), packed.payload
            compressed = compress(tables)
            fits = len(compressed) <= MAX_TABLE_BYTES
            staged = Staged(
                number,
                self._slab.offset_of(payload) if fits else None,
                compressed if fits else b"",
                packed.layout.outer_ranks.tobytes(),
                packed.outer_scales.tobytes(),
                packed.layout.has_affines,
                packed.layout.rows,
                tuple(stages),
                self._counts(),
            )
            # The engine may release the piece immediately, so drop all references to it first.
            del packed
            if staged.begin is None:
                parts = [payload.reshape(-1)] if fits else [payload.reshape(-1), np.frombuffer(tables, np.uint8)]
                with _memory_of(parts) as descriptor:
                    self._send(staged, descriptor)
            else:
                self._given_out[staged.begin] = payload
                del payload
                try:
                    self._send(staged)
                except BaseException:
                    del self._given_out[staged.begin]
                    raise
        except StoreError as error:
            self._send(Failed(number, str(error)[:MAX_MESSAGE_CHARS], tuple(stages), self._counts()))
        except Exception as error:
            # Report every failure, because requests are waiting for this adapter.
            self._send(Failed(number, f"loading failed: {type(error).__name__}", tuple(stages), self._counts()))
        finally:
            self._under_way.pop(number, None)

    def _look(self) -> None:
        contents = encode(self._source.disk.contents())
        try:
            with _memory_of([np.frombuffer(contents, np.uint8)]) as descriptor:
                self._send(Looked(self._counts()), descriptor)
        except OSError:
            self._send(Looked(self._counts()))

    def _purge(self, digest: str) -> None:
        try:
            self._source.disk.purge(digest)
        except OSError as error:
            print(f"the files of purged adapter {digest[:12]} cannot be deleted: {error}", file=sys.stderr)
        self._send(Purged(digest))

    def _counts(self) -> msgspec.Raw:
        return msgspec.Raw(encode(self._source.figures.snapshot()))

    def _send(self, message: FromStaging, *descriptors: int) -> None:
        # If the engine is gone, `serve` returns and the process exits.
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._end, [encode(message)], descriptors)


@contextmanager
def _memory_of(parts: Sequence[npt.NDArray[np.uint8]]) -> Iterator[int]:
    """Yield a descriptor of new memory with these contents. The receiver's copy of it keeps the memory alive."""
    descriptor = shared_memory(sum(part.size for part in parts))
    try:
        np.concatenate(parts, out=mapped(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def main() -> None:
    # Ctrl-C reaches every process in the terminal. Ignore it, because the engine decides when this process exits.
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
        # Do not wait for threads that are blocked on the blob store.
        os._exit(code)


def _serve(end: socket.socket, slab: HostSlab, config: StagingConfig) -> None:
    try:
        target = PackTarget.from_document(config.target)
        blobs = open_blob_store(config.blob_url)
        disk = DiskTier(Path(config.disk_dir), config.disk_bytes, target.pack_key)
    except StoreError as error:
        _refuse(end, str(error))
        return
    except OSError as error:
        message = (
            f"the disk tier's directory cannot be used ({error.strerror or error}): choose another "
            "disk_tier_dir on a local disk that this user can write to"
        )
        _refuse(end, message)
        return
    with suppress(ConnectionResetError):
        quantized_dir = None if config.quantized_dir is None else Path(config.quantized_dir)
        base = BaseWeights(Path(config.model_dir), quantized_dir)
        source = PackedSource(blobs, disk, target, base, slab.allocate)
        StagingServer(end, source, slab, config.num_threads).serve()


def _refuse(end: socket.socket, message: str) -> None:
    # The engine may be gone.
    with suppress(BrokenPipeError, ConnectionResetError):
        end.send(encode(Refused(message)))


if __name__ == "__main__":
    main()

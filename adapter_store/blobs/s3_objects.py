"""Reads objects that are too large for one attempt, in order and from any byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.blobs.s3_calls import PreconditionFailed, RangeRefused, S3Calls
from loramux.adapter_store.blobs.s3_limits import Deadline
from loramux.adapter_store.blobs.s3_reading import READING, FoundBlob, MemorySink, S3Reader
from loramux.adapter_store.errors import BlobStoreUnavailable


class _PartSink(MemorySink):
    """A sink that collects one part of a blob, which begins at byte `start`."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def write(self, offset: int, chunk: bytes) -> None:
        super().write(offset - self._start, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Object:
    """An object's size, ETag and, if the store keeps one, the algorithm and value of its checksum."""

    size: int
    etag: str
    checksum: tuple[str, str] | None


class S3Objects:
    def __init__(self, calls: S3Calls, reader: S3Reader) -> None:
        self._calls = calls
        self._reader = reader
        self._limits = calls.limits

    def describe(self, key: str) -> S3Object:
        """Raises BlobNotFound or BlobStoreUnavailable."""
        answer: Any = self._calls.send(
            "look up a blob", lambda: self._calls.client.head_object(Bucket=self._calls.bucket, Key=key)
        )
        return S3Object(
            size=int(answer["ContentLength"]), etag=answer.get("ETag", ""), checksum=self._reader.checksum_of(answer)
        )

    def chunks(self, key: str, described: S3Object, offset: int) -> Iterator[bytes]:
        """Yield the bytes of an object from `offset`, read in parallel parts. The caller verifies the checksum.

        Raises BlobNotFound, or BlobStoreUnavailable, also if the object was replaced after it was described.
        """
        starts = iter(range(offset, described.size, self._limits.part_bytes))
        found = FoundBlob(size=described.size, etag=described.etag, checksum=described.checksum, num_read=0)

        def read_part(start: int) -> bytes:
            sink = _PartSink(start)
            sink.resize(min(self._limits.part_bytes, described.size - start))
            deadline = Deadline(self._limits.body_deadline_s(len(sink.buffer)))
            # Some stores reject a correct If-Match, so only the ETags that come with the parts are compared.
            self._calls.run(READING, self._reader.part_attempt(key, sink, found, start, may_demand=False), deadline)
            return bytes(sink.buffer)

        with ThreadPoolExecutor(self._limits.num_parallel, thread_name_prefix="s3-reader") as executor:
            waiting: deque[Future[bytes]] = deque()
            try:
                while True:
                    while len(waiting) < self._limits.num_parallel and (start := next(starts, None)) is not None:
                        waiting.append(executor.submit(read_part, start))
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            except (PreconditionFailed, RangeRefused) as error:
                raise BlobStoreUnavailable(f"cannot {READING}: it was replaced during the read") from error
            finally:
                executor.shutdown(wait=True, cancel_futures=True)

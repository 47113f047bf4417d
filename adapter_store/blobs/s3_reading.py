"""Reads a blob from S3, in parallel parts if it is large, and verifies its checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loramux.adapter_store.blobs.interface import check_size
from loramux.adapter_store.blobs.s3_calls import AttemptFailed, PreconditionFailed, RangeRefused, S3Calls
from loramux.adapter_store.blobs.s3_limits import MAX_BLOB_BYTES, Deadline

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

SHA256_METADATA = "loramux-sha256"
"""Metadata key under which loramux stores a blob's SHA-256.

Nearly every store returns such metadata. An ETag is the object's MD5 only if the object was put whole and is not
encrypted with a KMS key or a key that the client provides. Few stores support Amazon S3's own checksums.
"""

_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_SHA256 = re.compile(r"[0-9a-f]{64}")
# In Amazon S3's directory buckets, an ETag is not an MD5.
_DIRECTORY_BUCKET = "--x-s3"
READING = "read a blob"


class Sink(Protocol):
    """Receives a blob's bytes in any order, from several threads."""

    def resize(self, num_bytes: int) -> None: ...

    def write(self, offset: int, chunk: bytes) -> None: ...

    def checksum(self, algorithm: str) -> str: ...


class FileSink:
    """A sink that creates or truncates a file. Use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def resize(self, num_bytes: int) -> None:
        os.ftruncate(self._file.fileno(), num_bytes)
        if num_bytes > 0:
            # Detect a full disk before fetching the bytes. Some file systems do not support the call.
            try:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise

    def write(self, offset: int, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            written = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[written:], offset + written

    def checksum(self, algorithm: str) -> str:
        self._file.seek(0)
        hashed = _hasher(algorithm)
        while chunk := self._file.read(_CHUNK_BYTES):
            hashed.update(chunk)
        return str(hashed.hexdigest())


class MemorySink:
    """A sink that collects the bytes in memory."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def resize(self, num_bytes: int) -> None:
        self.buffer = bytearray(num_bytes)

    def write(self, offset: int, chunk: bytes) -> None:
        self.buffer[offset : offset + len(chunk)] = chunk

    def checksum(self, algorithm: str) -> str:
        hashed = _hasher(algorithm)
        hashed.update(self.buffer)
        return str(hashed.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBlob:
    """A blob's properties from the first response, and the number of leading bytes in that response."""

    size: int
    etag: str
    checksum: tuple[str, str] | None
    num_read: int


class S3Reader:
    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls
        self._limits = calls.limits

    def read(self, key: str, sink: Sink, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        """Copy a blob into `sink`. Raises BlobNotFound, BlobTooLarge, BlobDamaged or BlobStoreUnavailable."""
        deadline = Deadline(self._limits.body_s if deadline_s is None else deadline_s)
        may_demand = True
        for number in range(self._limits.max_attempts):
            found = self._read_beginning(key, sink, max_bytes, deadline)
            if deadline_s is None:
                deadline.extend(self._limits.body_deadline_s(found.size))
            try:
                self._read_rest(key, sink, found, deadline, may_demand)
            except PreconditionFailed:
                # The object was replaced, or the store rejects this form of If-Match. From now on, compare only the
                # ETags that come with the parts.
                may_demand = False
                failure = AttemptFailed("the blob was replaced during the read", is_outage=False)
            else:
                if found.checksum is None or sink.checksum(found.checksum[0]) == found.checksum[1]:
                    return
                failure = AttemptFailed("the bytes are damaged", is_outage=False, is_damage=True)
            self._calls.pause_or_give_up(READING, number, failure, deadline)

    def _read_beginning(self, key: str, sink: Sink, max_bytes: int | None, deadline: Deadline) -> FoundBlob:
        def attempt(asked: dict[str, Any]) -> FoundBlob:
            answer = self._calls.ask(lambda: self._calls.client.get_object(Bucket=self._calls.bucket, Key=key, **asked))
            with closing(answer["Body"]):
                size, length = self._sizes(answer)
                check_size(size, max_bytes)
                sink.resize(size)
                self._copy(answer, 0, length, sink)
            return FoundBlob(size=size, etag=answer.get("ETag", ""), checksum=self.checksum_of(answer), num_read=length)

        try:
            return self._calls.run(READING, lambda: attempt({"Range": _range(0, self._limits.part_bytes)}), deadline)
        except RangeRefused:
            # An empty blob has no ranges.
            return self._calls.run(READING, lambda: attempt({}), deadline)

    def _sizes(self, answer: GetObjectOutputTypeDef) -> tuple[int, int]:
        """Return the blob's size, and the length of this response, which starts at the blob's first byte."""
        length = answer.get("ContentLength", -1)
        if answer["ResponseMetadata"].get("HTTPStatusCode") != 206:
            size, wanted = length, length
        else:
            found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
            if found is None or int(found[1]) != 0:
                raise AttemptFailed("the response is not the requested range")
            size = int(found[3])
            wanted = min(size, self._limits.part_bytes)
        # Do not let a damaged length determine how much memory is allocated.
        if length < 0 or length != wanted or size > MAX_BLOB_BYTES:
            raise AttemptFailed("the response has an inconsistent length")
        return size, length

    def _read_rest(self, key: str, sink: Sink, found: FoundBlob, deadline: Deadline, may_demand: bool) -> None:
        starts = range(found.num_read, found.size, self._limits.part_bytes)
        if not starts:
            return

        def read_part(start: int) -> None:
            attempt = self.part_attempt(key, sink, found, start, may_demand)
            self._calls.run(READING, attempt, deadline)

        with ThreadPoolExecutor(self._limits.num_parallel, thread_name_prefix="s3-reader") as executor:
            futures = [executor.submit(read_part, start) for start in starts]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                executor.shutdown(wait=True, cancel_futures=True)
                raise

    def part_attempt(self, key: str, sink: Sink, found: FoundBlob, start: int, may_demand: bool) -> Callable[[], None]:
        length = min(self._limits.part_bytes, found.size - start)
        wanted = f"bytes {start}-{start + length - 1}/{found.size}"
        # Strip the ETag's quotes, because only some stores strip them before comparing.
        demand: Any = {"IfMatch": found.etag.strip('"')} if found.etag and may_demand else {}

        def attempt() -> None:
            answer = self._calls.ask(
                lambda: self._calls.client.get_object(
                    Bucket=self._calls.bucket, Key=key, Range=_range(start, length), **demand
                )
            )
            with closing(answer["Body"]):
                if answer.get("ETag", "") != found.etag:
                    raise PreconditionFailed
                if answer.get("ContentRange") != wanted:
                    raise AttemptFailed("the response is not the requested range")
                self._copy(answer, start, length, sink)

        return attempt

    def _copy(self, answer: GetObjectOutputTypeDef, offset: int, length: int, sink: Sink) -> None:
        end = offset + length
        while offset < end:
            try:
                chunk = answer["Body"].read(min(_CHUNK_BYTES, end - offset))
            except Exception as error:
                # urllib3 and ssl errors pass through boto3 unwrapped here.
                raise AttemptFailed(f"connection failed ({type(error).__name__})") from error
            if not chunk:
                raise AttemptFailed("the connection closed early")
            sink.write(offset, chunk)
            offset += len(chunk)

    def checksum_of(self, answer: Any) -> tuple[str, str] | None:
        """Return the algorithm and value of the whole blob's checksum, or None if the store keeps none."""
        ours = answer.get("Metadata", {}).get(SHA256_METADATA, "")
        if _SHA256.fullmatch(ours):
            return "sha256", ours
        md5 = _MD5.fullmatch(answer.get("ETag", ""))
        is_encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in answer
        if md5 is None or is_encrypted or self._calls.bucket.endswith(_DIRECTORY_BUCKET):
            return None
        return "md5", md5[1]


def _range(start: int, length: int) -> str:
    return f"bytes={start}-{start + length - 1}"


def _hasher(algorithm: str) -> Any:
    return hashlib.new(algorithm, usedforsecurity=False)

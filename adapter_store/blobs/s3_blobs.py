"""Blobs in an S3 bucket, or in any store that speaks the S3 protocol."""

from __future__ import annotations

import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from loramux.adapter_store.blobs.circuit_breaker import BreakerState, CircuitBreaker
from loramux.adapter_store.blobs.interface import (
    MAX_READ_BYTES,
    BlobInfo,
    BlobStore,
    PresignedParts,
    PresignedPut,
    check_key,
)
from loramux.adapter_store.blobs.retry_budget import RetryBudget
from loramux.adapter_store.blobs.s3_calls import S3Calls
from loramux.adapter_store.blobs.s3_connections import connect
from loramux.adapter_store.blobs.s3_limits import Deadline, S3Limits
from loramux.adapter_store.blobs.s3_objects import S3Object, S3Objects
from loramux.adapter_store.blobs.s3_presigned import S3Presigner
from loramux.adapter_store.blobs.s3_probe import PROBES, S3Probe
from loramux.adapter_store.blobs.s3_reading import SHA256_METADATA, FileSink, MemorySink, S3Reader
from loramux.adapter_store.blobs.s3_writing import S3Writer
from loramux.adapter_store.errors import BlobNotFound

_COPIES = "the store obeys unsigned x-amz-copy-source headers"
_CRASHED_AFTER_S = 86_400
"""Age at which a multipart upload or a probe blob counts as abandoned, in seconds."""
# Matches the checksum of a whole object. A multipart object may instead have a checksum of checksums, with the number
# of parts as a suffix.
_SHA256 = re.compile(r"[A-Za-z0-9+/]{43}=")


log = structlog.get_logger()


class S3BlobStore(BlobStore):
    """Blobs under `prefix` in a bucket. boto3 reads the credentials, region and endpoint from its usual sources.

    The store must honour `If-None-Match: *` on PUT. The following features are optional. If one is missing, S3BlobStore
    does without it:

    - `If-None-Match: *` when a multipart upload is completed: see S3Writer;
    - `Content-MD5` on PUT: damage in transit is detected only at the next read;
    - metadata, for each blob's SHA-256: a read compares the ETag if it is an MD5, otherwise only the size;
    - `x-amz-checksum-sha256` on presigned PUTs: ingestion hashes the bytes anyway;
    - `If-Match` on range requests: only the ETags in the responses are compared;
    - refusal of unsigned `x-amz-copy-source` headers: clients then send their files to a server instead of the bucket.
      `is_presigning` overrides this test.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        limits: S3Limits | None = None,
        breaker: CircuitBreaker | None = None,
        budget: RetryBudget | None = None,
        now_s: Callable[[], float] = time.time,
        is_presigning: bool | None = None,
    ) -> None:
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._breaker = breaker or CircuitBreaker()
        limits = limits or S3Limits()
        self._calls = S3Calls(connect(limits), bucket, limits, self._breaker, budget or RetryBudget())
        self._probe = S3Probe(self._calls, self._prefix)
        self._reader = S3Reader(self._calls)
        self._objects = S3Objects(self._calls, self._reader)
        self._writer = S3Writer(self._calls, self._completes_conditionally)
        self._presigner = S3Presigner(self._calls)
        self._now_s = now_s
        self._lock = threading.Lock()
        self._is_conditional: bool | None = None
        self._is_presigning = is_presigning

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state

    def check(self) -> None:
        self._probe.check()

    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        return self._writer.put(self._key(key), source, deadline_s)

    def get(self, key: str, destination: Path, max_bytes: int | None = None, deadline_s: float | None = None) -> None:
        name = self._key(key)
        with FileSink(destination) as sink:
            self._reader.read(name, sink, max_bytes, deadline_s)

    def read_bytes(self, key: str) -> bytes:
        sink = MemorySink()
        self._reader.read(self._key(key), sink, MAX_READ_BYTES)
        return bytes(sink.buffer)

    def describe(self, key: str) -> S3Object:
        """Raises BlobNotFound or BlobStoreUnavailable."""
        return self._objects.describe(self._key(key))

    def chunks(self, key: str, described: S3Object, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a large object from `offset`. The caller verifies the checksum. See S3Objects.chunks."""
        return self._objects.chunks(self._key(key), described, offset)

    def head(self, key: str) -> BlobInfo | None:
        name = self._key(key)
        try:
            answer: Any = self._calls.send(
                "look up a blob",
                lambda: self._calls.client.head_object(Bucket=self._calls.bucket, Key=name, ChecksumMode="ENABLED"),
            )
        except BlobNotFound:
            return None
        sha256 = answer.get("Metadata", {}).get(SHA256_METADATA)
        if sha256 is None and _SHA256.fullmatch(answer.get("ChecksumSHA256", "")):
            sha256 = b64decode(answer["ChecksumSHA256"]).hex()
        return BlobInfo(size=answer["ContentLength"], etag=answer.get("ETag", "").strip('"') or None, sha256=sha256)

    def delete(self, key: str) -> None:
        name = self._key(key)
        # Some stores return an error for a blob that does not exist.
        with suppress(BlobNotFound):
            self._calls.send(
                "delete a blob", lambda: self._calls.client.delete_object(Bucket=self._calls.bucket, Key=name)
            )

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        def list_all() -> list[str]:
            pages = self._calls.client.get_paginator("list_objects_v2").paginate(
                Bucket=self._calls.bucket, Prefix=self._prefix + prefix
            )
            return [item["Key"].removeprefix(self._prefix) for page in pages for item in page.get("Contents", [])]

        deadline = Deadline(self._calls.limits.body_s)
        yield from sorted(self._calls.send("list blobs", list_all, deadline))

    def remove_unfinished(self) -> None:
        """Abort multipart uploads (presigned ones too) and delete probe blobs that are more than a day old."""
        oldest_s = self._now_s() - _CRASHED_AFTER_S
        calls = self._calls

        def list_uploads() -> list[Any]:
            pages = calls.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=calls.bucket, Prefix=self._prefix
            )
            return [upload for page in pages for upload in page.get("Uploads", [])]

        def list_probes() -> list[Any]:
            pages = calls.client.get_paginator("list_objects_v2").paginate(
                Bucket=calls.bucket, Prefix=self._prefix + PROBES
            )
            return [item for page in pages for item in page.get("Contents", [])]

        for upload in calls.send("list uploads", list_uploads, Deadline(calls.limits.body_s)):
            if upload["Initiated"].timestamp() < oldest_s:
                self._presigner.abort(upload["Key"], upload["UploadId"])
        for item in calls.send("list probe blobs", list_probes):
            if item["LastModified"].timestamp() < oldest_s:
                self.delete(item["Key"].removeprefix(self._prefix))

    def presign_put(self, key: str, size: int, sha256: str, expires_s: int) -> PresignedPut | None:
        return self._presigner.put(self._key(key), size, sha256, expires_s) if self._presigns() else None

    def presign_parts(self, key: str, size: int, expires_s: int) -> PresignedParts | None:
        return self._presigner.parts(self._key(key), size, expires_s) if self._presigns() else None

    def complete_parts(self, key: str, upload_id: str, size: int) -> bool:
        return self._presigner.complete(self._key(key), upload_id, size, self._completes_conditionally())

    def abort_parts(self, key: str, upload_id: str) -> None:
        self._presigner.abort(self._key(key), upload_id)

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _presigns(self) -> bool:
        with self._lock:
            if self._is_presigning is None:
                self._is_presigning = self._probe.keeps_presigned_puts_from_copying()
                if not self._is_presigning:
                    log.warning("presigned_uploads_off", bucket=self._calls.bucket, reason=_COPIES)
            return self._is_presigning

    def _completes_conditionally(self) -> bool:
        with self._lock:
            if self._is_conditional is None:
                self._is_conditional = self._probe.completes_conditionally()
            return self._is_conditional

"""Writes a blob to S3 if its key is free, in one request or in parallel parts."""

from __future__ import annotations

import hashlib
import io
import uuid
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from loramux.adapter_store.blobs.s3_calls import PreconditionFailed, S3Calls
from loramux.adapter_store.blobs.s3_limits import MAX_PARTS, MAX_SINGLE_PUT_BYTES, Deadline
from loramux.adapter_store.blobs.s3_reading import SHA256_METADATA
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

PUT_METADATA = "loramux-put"
"""Metadata key for a random ID per put. After a lost response, the ID shows whether this put stored the blob."""

_CHUNK_BYTES = 1 << 20
_WHAT = "write a blob"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Put:
    key: str
    source: Path | bytes
    size: int
    md5: str
    metadata: dict[str, str]

    def open(self) -> IO[bytes]:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    @property
    def id(self) -> str:
        return self.metadata[PUT_METADATA]


class S3Writer:
    """Puts blobs with `If-None-Match: *`, so that an existing blob is not replaced.

    `completes_conditionally` returns True if the store honours that header for multipart uploads too. If not, files of
    up to 5 GiB are sent in one request. A larger upload is completed if its key is free once all parts have arrived,
    so it can replace a blob that another client puts during the completion.
    """

    def __init__(self, calls: S3Calls, completes_conditionally: Callable[[], bool]) -> None:
        self._calls = calls
        self._limits = calls.limits
        self._completes_conditionally = completes_conditionally

    def put(self, key: str, source: Path | bytes, deadline_s: float | None = None) -> bool:
        """Store a blob, or return False if the key is taken. If it raises BlobStoreUnavailable, the blob may exist."""
        put = _describe(key, source)
        deadline = Deadline(self._limits.body_deadline_s(put.size) if deadline_s is None else deadline_s)
        try:
            if put.size <= self._limits.part_bytes:
                return self._put_whole(put, deadline)
            if self._completes_conditionally() or put.size > MAX_SINGLE_PUT_BYTES:
                return self._put_parts(put, deadline)
            return self._put_whole(put, deadline)
        except (BlobNotFound, PreconditionFailed) as error:
            # Another client deleted the blob or aborted its upload during this call.
            raise BlobStoreUnavailable(
                f"cannot {_WHAT} in the bucket {self._calls.bucket}: it was removed in the meantime"
            ) from error

    def _put_whole(self, put: _Put, deadline: Deadline) -> bool:
        num_attempts = 0

        def attempt() -> None:
            nonlocal num_attempts
            num_attempts += 1
            with put.open() as body:
                self._calls.ask(
                    lambda: self._calls.client.put_object(
                        Bucket=self._calls.bucket,
                        Key=put.key,
                        Body=body,
                        ContentLength=put.size,
                        # More stores verify this checksum than the newer checksums of Amazon S3.
                        ContentMD5=put.md5,
                        Metadata=put.metadata,
                        IfNoneMatch="*",
                    )
                )

        try:
            self._calls.run(_WHAT, attempt, deadline)
        except PreconditionFailed:
            # This put may have stored the blob itself: an earlier attempt may have succeeded although its response was
            # lost.
            return num_attempts > 1 and self._is_ours(put, deadline)
        return True

    def _put_parts(self, put: _Put, deadline: Deadline) -> bool:
        if self._is_taken(put.key, deadline):
            return False
        calls = self._calls
        upload_id = calls.send(
            _WHAT,
            lambda: calls.client.create_multipart_upload(Bucket=calls.bucket, Key=put.key, Metadata=put.metadata)[
                "UploadId"
            ],
            deadline,
        )
        try:
            parts = self._upload_parts(put, upload_id, deadline)
            is_ours = self._complete(put, upload_id, parts, deadline)
        except BaseException:
            self._abort(put.key, upload_id)
            raise
        if not is_ours:
            self._abort(put.key, upload_id)
        return is_ours

    def _upload_parts(self, put: _Put, upload_id: str, deadline: Deadline) -> list[CompletedPartTypeDef]:
        # Use larger parts if the file would otherwise exceed S3's maximum number of parts.
        part_bytes = max(self._limits.part_bytes, -(-put.size // MAX_PARTS))

        def upload(number: int) -> CompletedPartTypeDef:
            with put.open() as file:
                file.seek((number - 1) * part_bytes)
                body = file.read(part_bytes)
            md5 = b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            answer = self._calls.send(
                _WHAT,
                lambda: self._calls.client.upload_part(
                    Bucket=self._calls.bucket,
                    Key=put.key,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=body,
                    ContentMD5=md5,
                ),
                deadline,
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        num_parts = -(-put.size // part_bytes)
        with ThreadPoolExecutor(self._limits.num_parallel, thread_name_prefix="s3-writer") as executor:
            futures = [executor.submit(upload, number) for number in range(1, num_parts + 1)]
            try:
                return [future.result() for future in futures]
            except BaseException:
                executor.shutdown(wait=True, cancel_futures=True)
                raise

    def _complete(self, put: _Put, upload_id: str, parts: list[CompletedPartTypeDef], deadline: Deadline) -> bool:
        condition: Any = {"IfNoneMatch": "*"}
        if not self._completes_conditionally():
            if self._is_taken(put.key, deadline):
                return False
            condition = {}
        try:
            self._calls.send(
                _WHAT,
                lambda: self._calls.client.complete_multipart_upload(
                    Bucket=self._calls.bucket,
                    Key=put.key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                    **condition,
                ),
                deadline,
            )
        except (PreconditionFailed, BlobNotFound):
            # The key is taken or the parts are gone, perhaps because an earlier attempt succeeded and its response was
            # lost.
            if self._is_ours(put, deadline):
                return True
            if self._is_taken(put.key, deadline):
                return False
            raise
        return True

    def _is_taken(self, key: str, deadline: Deadline) -> bool:
        return self._metadata(key, deadline) is not None

    def _is_ours(self, put: _Put, deadline: Deadline) -> bool:
        return (self._metadata(put.key, deadline) or {}).get(PUT_METADATA) == put.id

    def _metadata(self, key: str, deadline: Deadline) -> dict[str, str] | None:
        calls = self._calls
        try:
            return calls.send(
                "look up a blob",
                lambda: calls.client.head_object(Bucket=calls.bucket, Key=key).get("Metadata", {}),
                deadline,
            )
        except BlobNotFound:
            return None

    def _abort(self, key: str, upload_id: str) -> None:
        # If this fails, `remove_unfinished` aborts the upload after a day.
        with suppress(BlobStoreUnavailable, BlobNotFound):
            self._calls.send(
                "abort an upload",
                lambda: self._calls.client.abort_multipart_upload(
                    Bucket=self._calls.bucket, Key=key, UploadId=upload_id
                ),
            )


def _describe(key: str, source: Path | bytes) -> _Put:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    size = 0
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            md5.update(chunk)
            sha256.update(chunk)
            size += len(chunk)
    return _Put(
        key=key,
        source=source,
        size=size,
        md5=b64encode(md5.digest()).decode(),
        metadata={SHA256_METADATA: sha256.hexdigest(), PUT_METADATA: uuid.uuid4().hex},
    )

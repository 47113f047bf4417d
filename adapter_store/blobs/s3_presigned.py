"""Signed requests that let clients put blobs into the bucket themselves."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError

from loramux.adapter_store.blobs.interface import PresignedParts, PresignedPut
from loramux.adapter_store.blobs.s3_calls import PreconditionFailed, S3Calls
from loramux.adapter_store.blobs.s3_limits import MAX_PARTS
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable, PartsMissing

_WHAT = "prepare a multipart upload"
_MAX_EXPIRES_S = 7 * 86_400
"""Longest signature lifetime that stores accept, in seconds."""


class S3Presigner:
    """Signs requests, and completes or aborts the multipart uploads that it begins.

    Each signature covers the length, so the store accepts no other number of bytes. The signature for a whole blob also
    covers its SHA-256, but only stores that support `x-amz-checksum-sha256` compare it with the bytes: MinIO and
    Amazon S3 do, but Ceph 16 does not.
    """

    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls
        self._limits = calls.limits

    def put(self, key: str, size: int, sha256: str, expires_s: int) -> PresignedPut | None:
        if size > self._limits.part_bytes:
            return None
        checksum = b64encode(bytes.fromhex(sha256)).decode()
        url = self._sign(
            "put_object", expires_s, {"Key": key, "ContentLength": size, "ChecksumSHA256": checksum, "IfNoneMatch": "*"}
        )
        return _presigned(url, {"content-length": str(size), "x-amz-checksum-sha256": checksum, "if-none-match": "*"})

    def parts(self, key: str, size: int, expires_s: int) -> PresignedParts | None:
        if size <= self._limits.part_bytes:
            return None
        calls = self._calls
        part_bytes = max(self._limits.part_bytes, -(-size // MAX_PARTS))
        upload_id = calls.send(
            _WHAT, lambda: calls.client.create_multipart_upload(Bucket=calls.bucket, Key=key)["UploadId"]
        )
        parts = []
        for number, start in enumerate(range(0, size, part_bytes), 1):
            length = min(part_bytes, size - start)
            parameters = {"Key": key, "UploadId": upload_id, "PartNumber": number, "ContentLength": length}
            parts.append(_presigned(self._sign("upload_part", expires_s, parameters), {"content-length": str(length)}))
        return PresignedParts(upload_id=upload_id, part_bytes=part_bytes, parts=tuple(parts))

    def complete(self, key: str, upload_id: str, size: int, is_conditional: bool) -> bool:
        calls = self._calls
        if self._size(key) is not None:
            self.abort(key, upload_id)
            return False
        # Ask the store, never the client, which parts arrived.
        found = calls.send(_WHAT, lambda: self._list(key, upload_id))
        if sum(part["Size"] for part in found) != size:
            raise PartsMissing("the uploaded parts do not add up to the declared size")
        parts: Any = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in found]
        condition: Any = {"IfNoneMatch": "*"} if is_conditional else {}
        num_attempts = 0

        def attempt() -> None:
            nonlocal num_attempts
            num_attempts += 1
            calls.ask(
                lambda: calls.client.complete_multipart_upload(
                    Bucket=calls.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, **condition
                )
            )

        try:
            calls.run(_WHAT, attempt)
        except PreconditionFailed:
            self.abort(key, upload_id)
            return False
        except BlobNotFound:
            # If an earlier attempt succeeded but its response was lost, the upload is gone and the blob exists.
            if num_attempts == 1 or self._size(key) != size:
                raise
        return True

    def abort(self, key: str, upload_id: str) -> None:
        calls = self._calls
        try:
            calls.send(
                "abort an upload",
                lambda: calls.client.abort_multipart_upload(Bucket=calls.bucket, Key=key, UploadId=upload_id),
            )
        except BlobNotFound:
            return

    def _list(self, key: str, upload_id: str) -> list[Any]:
        pages = self._calls.client.get_paginator("list_parts").paginate(
            Bucket=self._calls.bucket, Key=key, UploadId=upload_id
        )
        return [part for page in pages for part in page.get("Parts", [])]

    def _size(self, key: str) -> int | None:
        calls = self._calls
        try:
            return calls.send(_WHAT, lambda: calls.client.head_object(Bucket=calls.bucket, Key=key)["ContentLength"])
        except BlobNotFound:
            return None

    def _sign(self, call: str, expires_s: int, parameters: Mapping[str, Any]) -> str:
        try:
            return self._calls.client.generate_presigned_url(
                call,
                Params={"Bucket": self._calls.bucket, **parameters},
                ExpiresIn=min(expires_s, _MAX_EXPIRES_S),
            )
        except BotoCoreError as error:
            # There are no credentials, or temporary credentials cannot be refreshed now.
            raise BlobStoreUnavailable(
                f"cannot sign a request for the bucket {self._calls.bucket} ({type(error).__name__})"
            ) from error


def _presigned(url: str, headers: Mapping[str, str]) -> PresignedPut:
    return PresignedPut(url=url, method="PUT", headers=headers)

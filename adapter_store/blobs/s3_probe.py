"""Tests whether a bucket provides the guarantees that blobs rely on."""

from __future__ import annotations

import uuid
from contextlib import suppress
from urllib.parse import quote

from loramux.adapter_store.blobs.s3_calls import AttemptFailed, PreconditionFailed, S3Calls
from loramux.adapter_store.blobs.s3_connections import put_presigned
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable

PROBES = "probes/"
"""Key prefix of the one-byte blobs that the probe stores and then deletes."""

_PROBE_S = 60
"""Lifetime of a presigned request that the probe sends, in seconds."""

_REMEDY = "use a store with conditional writes (Amazon S3, Ceph 16+, MinIO 2024+), or a file:// blob URL"


class S3Probe:
    def __init__(self, calls: S3Calls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix

    def check(self) -> None:
        """Raise BlobStoreUnavailable unless the bucket exists and honours `If-None-Match: *`."""
        calls = self._calls
        try:
            calls.send("access objects", lambda: calls.client.head_bucket(Bucket=calls.bucket))
        except (BlobNotFound, BlobStoreUnavailable) as error:
            is_missing = isinstance(error, BlobNotFound)
            reason = f"the bucket {calls.bucket} does not exist" if is_missing else str(error)
            # The cause can be a wrong AWS_ENDPOINT_URL.
            raise BlobStoreUnavailable(f"{reason} (endpoint {calls.client.meta.endpoint_url})") from error
        key = self._new_key()
        try:
            # Ignore a refusal: the first attempt may have succeeded although its response was lost.
            with suppress(PreconditionFailed):
                self._put(key)
            calls.send("read back a blob", lambda: calls.client.head_object(Bucket=calls.bucket, Key=key))
            self._put(key)
        except PreconditionFailed:
            return
        except BlobNotFound as error:
            raise BlobStoreUnavailable(f"the bucket {calls.bucket} loses the blobs it accepts; {_REMEDY}") from error
        finally:
            self._delete(key)
        raise BlobStoreUnavailable(
            f"the bucket {calls.bucket} ignores If-None-Match, so blobs could be replaced; {_REMEDY}"
        )

    def completes_conditionally(self) -> bool:
        """Return whether the store honours `If-None-Match: *` when a multipart upload is completed.

        Raises BlobStoreUnavailable.
        """
        calls, key = self._calls, self._new_key()
        what = "test multipart uploads"
        with suppress(PreconditionFailed):
            self._put(key)
        try:
            upload_id = calls.send(
                what, lambda: calls.client.create_multipart_upload(Bucket=calls.bucket, Key=key)["UploadId"]
            )
            try:
                etag = calls.send(
                    what,
                    lambda: calls.client.upload_part(
                        Bucket=calls.bucket, Key=key, UploadId=upload_id, PartNumber=1, Body=b"2"
                    )["ETag"],
                )
                return calls.run(what, lambda: self._is_completion_refused(key, upload_id, etag))
            finally:
                with suppress(BlobStoreUnavailable, BlobNotFound):
                    calls.send(
                        what,
                        lambda: calls.client.abort_multipart_upload(Bucket=calls.bucket, Key=key, UploadId=upload_id),
                    )
        finally:
            self._delete(key)

    def keeps_presigned_puts_from_copying(self) -> bool:
        """Return whether a presigned PUT with the unsigned header `x-amz-copy-source` copies nothing.

        If it copied, its holder could put any blob of the bucket into an upload. Raises BlobStoreUnavailable.
        """
        calls, what = self._calls, "test presigned requests"
        source, target = self._new_key(), self._new_key()
        try:
            with suppress(PreconditionFailed):
                self._put(source)
            url = calls.client.generate_presigned_url(
                "put_object", Params={"Bucket": calls.bucket, "Key": target, "ContentLength": 1}, ExpiresIn=_PROBE_S
            )
            copying = {"content-length": "1", "x-amz-copy-source": quote(f"/{calls.bucket}/{source}")}
            calls.run(what, lambda: self._put_presigned(url, copying))
            found = calls.send(what, lambda: calls.client.get_object(Bucket=calls.bucket, Key=target)["Body"].read(2))
            return bool(found != b"1")
        except BlobNotFound:
            # The store has refused the request.
            return True
        finally:
            self._delete(source)
            self._delete(target)

    def _put_presigned(self, url: str, headers: dict[str, str]) -> None:
        status = self._calls.ask(lambda: put_presigned(self._calls.client, url, headers, b"2"))
        if status in (408, 429) or (status >= 500 and status != 501):
            raise AttemptFailed(str(status))

    def _is_completion_refused(self, key: str, upload_id: str, etag: str) -> bool:
        try:
            self._calls.ask(
                lambda: self._calls.client.complete_multipart_upload(
                    Bucket=self._calls.bucket,
                    Key=key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]},
                    IfNoneMatch="*",
                )
            )
        except PreconditionFailed:
            return True
        except BlobNotFound:
            # The parts are gone because an earlier attempt succeeded and its response was lost.
            return False
        except AttemptFailed as failure:
            if failure.can_retry:
                raise
            # The store rejects the header on this request.
            return False
        return False

    def _new_key(self) -> str:
        return f"{self._prefix}{PROBES}{uuid.uuid4().hex}"

    def _put(self, key: str) -> None:
        """Put a one-byte blob. Raises PreconditionFailed if the key is taken."""
        calls = self._calls

        def attempt() -> None:
            try:
                calls.ask(lambda: calls.client.put_object(Bucket=calls.bucket, Key=key, Body=b"1", IfNoneMatch="*"))
            except AttemptFailed as failure:
                if failure.reason in ("501", "NotImplemented"):
                    raise BlobStoreUnavailable(
                        f"the bucket {calls.bucket} does not support If-None-Match, which keeps blobs from being "
                        f"replaced; {_REMEDY}"
                    ) from failure
                raise

        calls.run("write a blob", attempt)

    def _delete(self, key: str) -> None:
        # `remove_unfinished` deletes the blob if this fails.
        with suppress(BlobStoreUnavailable):
            self._calls.send(
                "delete a blob", lambda: self._calls.client.delete_object(Bucket=self._calls.bucket, Key=key)
            )

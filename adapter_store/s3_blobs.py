"""Blobs in an S3 bucket, or in a store that speaks its protocol."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from loramux.adapter_store.blobs import BlobStore, check_key
from loramux.adapter_store.errors import BlobNotFound, BlobStoreUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
_ATTEMPTS = 3
_CHUNK_BYTES = 1 << 20
_ABSENT = ("404", "NoSuchKey", "NotFound")
_TAKEN = ("412", "PreconditionFailed")
_CONTENDED = ("409", "ConditionalRequestConflict")

T = TypeVar("T")


class S3BlobStore(BlobStore):
    """Keys below `prefix` of a bucket. Credentials, region and endpoint come from where boto3 looks for them."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        has_endpoint = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        self._client: S3Client = boto3.client(
            "s3",
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                # Stores other than Amazon's seldom have a host name for each bucket, and few know its new checksums.
                s3={"addressing_style": "path" if has_endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def check(self) -> None:
        try:
            self._call("be used", lambda: self._client.head_bucket(Bucket=self._bucket))
        except BlobNotFound as error:
            raise BlobStoreUnavailable(f"the bucket {self._bucket} does not exist") from error

    def put(self, key: str, source: Path | bytes) -> bool:
        if isinstance(source, bytes):
            return self._put(key, source)
        with source.open("rb") as file:
            return self._put(key, file)

    def get(self, key: str, destination: Path) -> None:
        for attempt in range(_ATTEMPTS):
            with destination.open("wb") as out:
                if self._copy_body(key, out, is_last=attempt == _ATTEMPTS - 1):
                    return
            _pause(attempt)

    def read_bytes(self, key: str) -> bytes:
        for attempt in range(_ATTEMPTS):
            out = io.BytesIO()
            if self._copy_body(key, out, is_last=attempt == _ATTEMPTS - 1):
                break
            _pause(attempt)
        return out.getvalue()

    def exists(self, key: str) -> bool:
        try:
            self._call(f"look for {key}", lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(key)))
        except BlobNotFound:
            return False
        return True

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        def list_all() -> list[str]:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [item["Key"].removeprefix(self._prefix) for page in pages for item in page.get("Contents", [])]

        yield from sorted(self._call("list blobs", list_all))

    def remove_unfinished(self) -> None:
        """S3 shows no blob before its last byte came, and drops what was cut off by itself."""

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _put(self, key: str, body: bytes | IO[bytes]) -> bool:
        try:
            return self._call(f"write {key}", lambda: self._put_if_absent(key, body))
        except BlobNotFound as error:
            raise BlobStoreUnavailable(f"the bucket {self._bucket} does not exist") from error

    def _put_if_absent(self, key: str, body: bytes | IO[bytes]) -> bool:
        for attempt in range(_ATTEMPTS):
            if not isinstance(body, bytes):
                body.seek(0)
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=body, IfNoneMatch="*")
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                if code in _TAKEN:
                    return False
                if code not in _CONTENDED or attempt == _ATTEMPTS - 1:
                    raise
                # Another writer of this key is at work: ask again once it has finished.
                _pause(attempt)
            else:
                return True
        raise AssertionError("unreachable")

    def _copy_body(self, key: str, out: IO[bytes], is_last: bool) -> bool:
        """Copy a blob; False where the connection broke inside it, after which boto3 does not try again."""
        answer = self._call(f"read {key}", lambda: self._client.get_object(Bucket=self._bucket, Key=self._key(key)))
        try:
            with closing(answer["Body"]) as body:
                for chunk in body.iter_chunks(_CHUNK_BYTES):
                    out.write(chunk)
        except BotoCoreError as error:
            if is_last:
                raise BlobStoreUnavailable(f"the bucket {self._bucket} broke off blob {key}: {error}") from error
            return False
        return True

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in _ABSENT:
                raise BlobNotFound(f"cannot {what}: not found") from None
            raise BlobStoreUnavailable(f"the bucket {self._bucket} cannot {what}: {code}") from error
        except BotoCoreError as error:
            raise BlobStoreUnavailable(f"the bucket {self._bucket} cannot {what}: {error}") from error


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.05, 0.2) * 2**attempt)

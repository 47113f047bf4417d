"""Opens the blob store that a URL names."""

from __future__ import annotations

import re
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.errors import InvalidBlobUrl

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")


def open_blob_store(url: str) -> BlobStore:
    """Open `file://DIRECTORY` or `s3://BUCKET[/PREFIX]` without connecting (see `check`). Raises InvalidBlobUrl."""
    scheme, separator, rest = url.partition("://")
    if scheme == "file" and separator and rest:
        return LocalBlobStore(Path(rest))
    if scheme == "s3" and separator:
        bucket, _, prefix = rest.partition("/")
        if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix):
            raise InvalidBlobUrl("the blob URL names no valid bucket or prefix: use s3://BUCKET or s3://BUCKET/PREFIX")
        # Import boto3 only for S3, because the import takes a quarter of a second.
        from loramux.adapter_store.blobs.s3_blobs import S3BlobStore

        return S3BlobStore(bucket, prefix)
    raise InvalidBlobUrl("the blob URL is not supported: use file://DIRECTORY or s3://BUCKET/PREFIX")

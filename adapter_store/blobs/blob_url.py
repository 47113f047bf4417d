"""Opens the blob store that a URL names."""

from __future__ import annotations

import re
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.errors import InvalidBlobUrl
from loramux.adapter_store.extensions import ExtensionKind

BLOB_STORES = ExtensionKind[BlobStore]("blob_stores", "blob store", BlobStore, taken=("file", "s3"))
"""Blob stores of extensions, by the scheme of their URLs. Each is called with the URL. A URL that cannot be used raises
InvalidBlobUrl.
"""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")


def open_blob_store(url: str) -> BlobStore:
    """Open `file://DIRECTORY`, `s3://BUCKET[/PREFIX]` or a URL of an extension without connecting (see `check`).

    Raises InvalidBlobUrl or ExtensionRefused.
    """
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
    opened = BLOB_STORES.make(scheme, url) if separator else None
    if opened is None:
        raise InvalidBlobUrl(f"the blob URL is not supported: use {blob_url_forms()}")
    return opened


def blob_url_forms() -> str:
    """Return the forms of URLs that can be opened here, for messages. Raises ExtensionRefused."""
    own = ("file://DIRECTORY", "s3://BUCKET/PREFIX")
    return " or ".join((*own, *(f"{scheme}://..." for scheme in BLOB_STORES.names)))


def is_blob_url(url: str) -> bool:
    """Return whether a URL has a scheme that can be opened here. Raises ExtensionRefused."""
    scheme, _, rest = url.partition("://")
    return bool(rest) and scheme in ("file", "s3", *BLOB_STORES.names)

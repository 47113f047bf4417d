"""Adapter files in an operator's bucket, which the server fetches itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore, check_size
from loramux.adapter_store.errors import (
    AdapterRejected,
    BlobNotFound,
    BlobStoreUnavailable,
    BlobTooLarge,
    InvalidBlobUrl,
    SourceUnavailable,
    UploadRefused,
)

MAX_URL_LENGTH = 1000
_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?")


class AdapterSources:
    """The `s3://BUCKET/PREFIX` locations from which adapters may be fetched; none by default.

    `open_store` opens the store for a URL; tests replace it.
    """

    def __init__(self, allowed: Collection[str] = (), open_store: Callable[[str], BlobStore] = open_blob_store) -> None:
        self._allowed = tuple(f"{url.rstrip('/')}/" for url in allowed)
        self._open_store = open_store

    def check(self, url: str) -> str:
        """Return the URL without trailing slashes. Raises UploadRefused unless the source is allowed."""
        if len(url) > MAX_URL_LENGTH or not is_source_url(url):
            raise UploadRefused("invalid_source", "a source must have the form s3://BUCKET/PREFIX", "source")
        if not f"{url.rstrip('/')}/".startswith(self._allowed or ("\0",)):
            raise UploadRefused("source_not_allowed", "adapters may not be taken from this source", "source")
        return url.rstrip("/")

    def has(self, url: str, name: str) -> bool:
        """Return True if a source has a file of that name. Raises the same errors as `fetch_file`."""
        with _told(name, 0):
            return self._open_store(self.check(url)).exists(name)

    def size(self, url: str, name: str, max_bytes: int) -> int:
        """Return the size of a source's file in bytes, without copying it. Raises the same errors as `fetch_file`."""
        with _told(name, max_bytes):
            found = self._open_store(self.check(url)).head(name)
            if found is None:
                raise BlobNotFound(name)
            check_size(found.size, max_bytes)
            return found.size

    def fetch_file(self, url: str, name: str, destination: Path, max_bytes: int) -> None:
        """Copy one file from a source. Raises AdapterRejected, or SourceUnavailable if a later attempt may succeed."""
        with _told(name, max_bytes):
            # Check again: the allowed sources may have changed since the version was created.
            self._open_store(self.check(url)).get(name, destination, max_bytes)


@contextmanager
def _told(name: str, max_bytes: int) -> Iterator[None]:
    """Translate errors from reading a source into the version's errors."""
    try:
        yield
    except BlobNotFound:
        raise AdapterRejected("source_not_found", "the source has no such file", name) from None
    except BlobTooLarge:
        raise AdapterRejected("file_too_large", f"the file has more than {max_bytes} bytes", name) from None
    except UploadRefused as error:
        raise AdapterRejected(error.code, error.message, error.param) from None
    except (BlobStoreUnavailable, InvalidBlobUrl) as error:
        raise SourceUnavailable(str(error)) from error


def is_source_url(url: str) -> bool:
    return _URL.fullmatch(url) is not None

"""Adapter files in an operator's bucket or in a repository of a Hugging Face hub, which the server fetches itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import InvalidBlobUrl, SourceUnavailable, UploadRefused
from loramux.adapter_store.ingest.bucket_source import BucketSource
from loramux.adapter_store.ingest.hub_client import HubClient
from loramux.adapter_store.ingest.hub_source import HubLocation, HubSource

MAX_URL_LENGTH = 1000
FORMS = "s3://BUCKET/PREFIX or hf://OWNER/NAME@REVISION"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?")
_ALLOWED_HUB = re.compile(r"hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?/?")


class Source(Protocol):
    """The files of one adapter. Raises AdapterRejected, or SourceUnavailable if a later attempt may succeed."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts to record in the version's report."""
        ...

    def has(self, name: str) -> bool: ...

    def size(self, name: str, max_bytes: int) -> int:
        """Return the size of a file in bytes, without copying it."""
        ...

    def fetch_file(self, name: str, destination: Path, max_bytes: int) -> None: ...


class AdapterSources:
    """The locations from which adapters may be fetched; none by default.

    A location is `s3://BUCKET/PREFIX` or `hf://OWNER/NAME@REVISION[#COMMIT]`. With a commit, the revision must still
    point to it. `allowed` contains prefixes such as `s3://BUCKET`, `hf://OWNER` or `hf://OWNER/NAME`. `open_store`
    opens the store for a bucket's URL; tests replace it.
    """

    def __init__(
        self,
        allowed: Collection[str] = (),
        open_store: Callable[[str], BlobStore] = open_blob_store,
        hub: HubClient | None = None,
    ) -> None:
        self._allowed = tuple(f"{url.rstrip('/')}/" for url in allowed)
        self._open_store = open_store
        self._hub = hub or HubClient()

    def check(self, url: str) -> str:
        """Return the URL without trailing slashes. Raises UploadRefused unless the source is allowed."""
        location = HubLocation.parse(url)
        if len(url) > MAX_URL_LENGTH or (location is None and not _BUCKET.fullmatch(url)):
            raise UploadRefused("invalid_source", f"a source must have the form {FORMS}", "source")
        place = url if location is None else location.repository_url
        if not f"{place.rstrip('/')}/".startswith(self._allowed or ("\0",)):
            raise UploadRefused("source_not_allowed", "adapters may not be fetched from this source", "source")
        return url.rstrip("/")

    def pin(self, url: str) -> str:
        """Check a URL. Return a hub's URL with the revision's current commit, or a bucket's URL without trailing
        slashes.

        Raises UploadRefused, AdapterRejected or SourceUnavailable.
        """
        location = HubLocation.parse(self.check(url))
        return url.rstrip("/") if location is None else location.at(location.resolve(self._hub)).url

    def open(self, url: str) -> Source:
        """Check a source again, because the allowed sources may have changed since it was recorded, and open it.

        Raises UploadRefused, SourceUnavailable, or AdapterRejected, for example if the revision on the hub has moved.
        """
        location = HubLocation.parse(self.check(url))
        if location is not None:
            return HubSource(self._hub, location.at(location.resolve(self._hub)))
        try:
            return BucketSource(self._open_store(url))
        except InvalidBlobUrl as error:
            raise SourceUnavailable(str(error)) from error


def is_allowable(url: str) -> bool:
    """Return whether a URL is a valid element of `AdapterSources.allowed`. Such a URL allows every source below it."""
    return any(form.fullmatch(url) is not None for form in (_BUCKET, _ALLOWED_HUB))

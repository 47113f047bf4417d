"""Adapter files in an operator's bucket, a directory, or a repository of a hub, which the server fetches itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import InvalidBlobUrl, SourceUnavailable, StoreError, UploadRefused
from loramux.adapter_store.extensions import ExtensionKind
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.sources.bucket_source import BucketSource
from loramux.adapter_store.sources.directory_source import FILE_SCHEME, DirectorySource
from loramux.adapter_store.sources.hub_source import HubLocation, HubSource

MAX_URL_LENGTH = 1000
FORMS = "s3://BUCKET/PREFIX, hf://OWNER/NAME@REVISION or file:///DIRECTORY"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?")
_ADDED = re.compile(r"[a-z][a-z0-9+._-]*://[A-Za-z0-9_][A-Za-z0-9._:@+=~-]*(/[A-Za-z0-9_][A-Za-z0-9._@+=~-]*)*/?")
"""A URL of an extension. No part of its path begins with a dot, so it cannot lead out of an allowed prefix."""

_DIRECTORY = re.compile(r"file://(/(?!\.{1,2}(/|$))[^/\x00-\x1f\x7f]+)+/?")
"""An absolute path without the parts `.` and `..`."""

_ALLOWED_HUB = re.compile(r"hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?/?")


@runtime_checkable
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


@runtime_checkable
class AdapterSource(Protocol):
    """Opens the locations of one URL scheme for an extension. Safe to use from several threads. Methods may block.

    Only URLs below an allowed prefix arrive here: `SCHEME://PART[/PART...]`, without a query. The methods raise
    AdapterRejected for a location that cannot be used, or SourceUnavailable if a later attempt may succeed.
    """

    def pin(self, url: str) -> str:
        """Return a URL of the same form that names the location's current state, or `url` if there is none.

        It is recorded with the version, and `open` is called with it, perhaps on another server.
        """
        ...

    def open(self, url: str) -> Source: ...


ADAPTER_SOURCES = ExtensionKind[AdapterSource](
    "adapter_sources", "adapter source", AdapterSource, taken=("s3", "hf", "file")
)
"""Adapter sources of extensions, by the scheme of their URLs. Each is called without arguments, once per process."""


class AdapterSources:
    """The locations from which adapters may be fetched; none by default.

    A location is `s3://BUCKET/PREFIX`, `hf://OWNER/NAME@REVISION[#COMMIT]`, `file:///DIRECTORY` or a URL of an
    extension. With a commit, the revision must still point to it. `allowed` contains prefixes such as `s3://BUCKET`,
    `hf://OWNER`, `hf://OWNER/NAME` or `file:///DIRECTORY`. `open_store` opens the store for a bucket's URL; tests
    replace it. Raises ExtensionRefused if the extension of an allowed scheme cannot be used.
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
        schemes = {_scheme(url) for url in allowed}.intersection(ADAPTER_SOURCES.names)
        self._added = {scheme: ADAPTER_SOURCES.required(scheme) for scheme in sorted(schemes)}

    def check(self, url: str) -> str:
        """Return the URL without trailing slashes. Raises UploadRefused unless the source is allowed."""
        location = HubLocation.parse(url)
        form = _ADDED if _scheme(url) in self._added else _DIRECTORY if _is_directory(url) else _BUCKET
        if len(url) > MAX_URL_LENGTH or (location is None and not form.fullmatch(url)):
            hint = "; the name of a bucket has 3 to 63 lower-case letters, digits, dots and hyphens"
            raise UploadRefused(
                "invalid_source",
                f"a source must have the form {FORMS}{hint if url.startswith('s3://') else ''}",
                "source",
            )
        place = url if location is None else location.repository_url
        if not f"{place.rstrip('/')}/".startswith(self._allowed or ("\0",)):
            raise UploadRefused(
                "source_not_allowed",
                "adapters may not be fetched from this source: the setting adapter_sources does not allow it",
                "source",
            )
        return url.rstrip("/")

    def pin(self, url: str) -> str:
        """Check a URL. Return a hub's URL with the revision's current commit, a bucket's URL without trailing slashes,
        or the URL that an extension returns.

        Raises UploadRefused, AdapterRejected or SourceUnavailable.
        """
        checked = self.check(url)
        location, added = HubLocation.parse(checked), self._added.get(_scheme(checked))
        if added is not None:
            with _blamed(checked):
                pinned = added.pin(checked)
                if not isinstance(pinned, str):
                    raise TypeError(f"pin returned an object of type {type(pinned).__name__} instead of str")
            return self.check(pinned)
        return url.rstrip("/") if location is None else location.at(location.resolve(self._hub)).url

    def open(self, url: str) -> Source:
        """Check a source again, because the allowed sources may have changed since it was recorded, and open it.

        Raises UploadRefused, SourceUnavailable, or AdapterRejected, for example if the revision on the hub has moved.
        """
        checked = self.check(url)
        location, added = HubLocation.parse(checked), self._added.get(_scheme(checked))
        if added is not None:
            with _blamed(checked):
                opened = added.open(checked)
                if not isinstance(opened, Source):
                    raise TypeError(f"open returned an object of type {type(opened).__name__} instead of Source")
            return opened
        if location is not None:
            return HubSource(self._hub, location.at(location.resolve(self._hub)))
        if _is_directory(checked):
            return self._directory(checked)
        try:
            return BucketSource(self._open_store(url))
        except InvalidBlobUrl as error:
            raise SourceUnavailable(str(error)) from error

    def _directory(self, url: str) -> DirectorySource:
        """Open a directory below the longest allowed prefix, which alone may contain symbolic links."""
        prefix = max((allowed for allowed in self._allowed if f"{url}/".startswith(allowed)), key=len)
        below = url[len(prefix) :]
        return DirectorySource(Path(prefix.removeprefix(FILE_SCHEME)), tuple(below.split("/")) if below else ())


def is_allowable(url: str) -> bool:
    """Return whether a URL is a valid element of `AdapterSources.allowed`. Such a URL allows every source below it."""
    if _scheme(url) in ADAPTER_SOURCES.names:
        return _ADDED.fullmatch(url) is not None
    return any(form.fullmatch(url) is not None for form in (_BUCKET, _ALLOWED_HUB, _DIRECTORY))


def added_forms() -> tuple[str, ...]:
    """Return the forms of the URLs of extensions, for messages. Raises ExtensionRefused."""
    return tuple(f"{scheme}://..." for scheme in ADAPTER_SOURCES.names)


@contextmanager
def _blamed(url: str) -> Iterator[None]:
    """Turn an unexpected error of an extension into SourceUnavailable, so that the version is tried again."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SourceUnavailable(f"the adapter source {_scheme(url)!r} failed: {reason}") from error


def _is_directory(url: str) -> bool:
    return url.startswith(FILE_SCHEME)


def _scheme(url: str) -> str:
    return url.partition("://")[0]

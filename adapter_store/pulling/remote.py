"""The files of a base model where it is published: a repository of a hub, or a bucket's prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from loramux.adapter_store.errors import (
    BlobNotFound,
    BlobStoreUnavailable,
    InvalidBlobUrl,
    PullRefused,
    SourceUnavailable,
)
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_files import Digest

if TYPE_CHECKING:
    from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
    from loramux.adapter_store.blobs.s3_objects import S3Object


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file's declared size and hash. The hash is None if the bucket keeps none."""

    name: str
    size: int
    digest: Digest | None


class Remote(Protocol):
    """The files at one moment. Raises PullRefused, another Refused, or SourceUnavailable if a retry may succeed."""

    @property
    def names(self) -> frozenset[str]: ...

    def file(self, name: str) -> RemoteFile:
        """Describe a file in `names`."""
        ...

    def commit(self, files: Sequence[RemoteFile]) -> str:
        """Return 40 hexadecimal digits that identify these files' content."""
        ...

    def chunks(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Yield a file's bytes from `offset`. The caller counts and verifies them."""
        ...


class HubRemote:
    """A repository at the commit to which a revision refers now. A later push does not change it."""

    def __init__(self, hub: HubClient, repository: str, revision: str) -> None:
        self._hub = hub
        self._repository = repository
        self._listing = hub.listing(repository, revision)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._listing.files)

    def file(self, name: str) -> RemoteFile:
        found = self._listing.files[name] or self._hub.file(self._repository, self._listing.commit, name)
        return RemoteFile(name, found.size, found.digest)

    def commit(self, files: Sequence[RemoteFile]) -> str:
        return self._listing.commit

    def chunks(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        return self._hub.chunks(self._repository, self._listing.commit, file.name, file.size, offset)


class BucketRemote:
    """The objects below a bucket's prefix. If one is replaced during the pull, the pull fails."""

    def __init__(self, place: str) -> None:
        # boto3 is imported only for S3, because the import takes a quarter of a second.
        from loramux.adapter_store.blobs.s3_blobs import S3BlobStore

        bucket, _, prefix = place.partition("/")
        with _translated(place):
            self._store: S3BlobStore = S3BlobStore(bucket, prefix)
            self.names = frozenset(self._store.list_keys())
        self._objects: dict[str, S3Object] = {}

    def file(self, name: str) -> RemoteFile:
        with _translated(name):
            found = self._objects[name] = self._store.describe(name)
        if found.checksum is None:
            return RemoteFile(name, found.size, None)
        algorithm: Any = found.checksum[0]
        return RemoteFile(name, found.size, Digest(algorithm, found.checksum[1]))

    def commit(self, files: Sequence[RemoteFile]) -> str:
        lines = sorted(f"{file.name} {file.size} {self._objects[file.name].etag}\n" for file in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]

    def chunks(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        with _translated(file.name):
            yield from self._store.chunks(file.name, self._objects[file.name], offset)


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except BlobNotFound:
        raise PullRefused("file_missing", f"the bucket has no {name}", name) from None
    except InvalidBlobUrl as error:
        raise PullRefused("invalid_model", str(error), "model") from error
    except BlobStoreUnavailable as error:
        raise SourceUnavailable(str(error), error.retry_after_s) from error

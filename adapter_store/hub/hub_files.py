"""What a hub says about a repository's files, in the forms of its API."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from loramux.adapter_store.errors import SourceUnavailable

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Digest:
    """A declared hash. `git` is the hash that Git gives a file: a SHA-1 over a header with the size, and the file."""

    algorithm: Literal["sha256", "md5", "git"]
    value: str

    def hasher(self, size: int) -> Any:
        if self.algorithm != "git":
            return hashlib.new(self.algorithm, usedforsecurity=False)
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest` is the SHA-256 of a large (Git LFS) file, or the Git hash of a small file."""

    name: str
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class HubListing:
    """All files of a repository at a commit. A file is None if the hub does not tell its size and hash here."""

    commit: str
    files: Mapping[str, HubFile | None]


class Revision(msgspec.Struct):
    sha: str


class LargeSibling(msgspec.Struct):
    sha256: str | None = None
    size: int | None = None


class Sibling(msgspec.Struct, rename="camel"):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: LargeSibling | None = None


class Repository(msgspec.Struct):
    sha: str
    siblings: list[Sibling] = []


class Large(msgspec.Struct):
    oid: str
    size: int


class Entry(msgspec.Struct):
    type: str
    path: str
    size: int = -1
    oid: str = ""
    lfs: Large | None = None


def checked_commit(sha: str) -> str:
    if not _COMMIT.fullmatch(sha):
        raise SourceUnavailable("the hub's response contains no commit")
    return sha


def entry_file(entry: Entry) -> HubFile:
    size, digest = (entry.size, entry.oid) if entry.lfs is None else (entry.lfs.size, entry.lfs.oid)
    return checked_file(entry.path, size, digest, entry.lfs is not None)


def sibling_file(sibling: Sibling) -> HubFile | None:
    if sibling.lfs is not None:
        if sibling.lfs.size is None or sibling.lfs.sha256 is None:
            return None
        return checked_file(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256, True)
    if sibling.size is None or sibling.blob_id is None:
        return None
    return checked_file(sibling.rfilename, sibling.size, sibling.blob_id, False)


def is_sha256(digest: str) -> bool:
    return _SHA256.fullmatch(digest) is not None


def checked_file(name: str, size: int, digest: str, is_large: bool) -> HubFile:
    if size < 0 or not (_SHA256 if is_large else _COMMIT).fullmatch(digest):
        raise SourceUnavailable("the hub's response contains a malformed size or hash")
    return HubFile(name, size, Digest("sha256" if is_large else "git", digest))

"""Downloads a version's files from the server, as they were uploaded."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.registry.records import DEFAULT_ALIAS
from loramux.admin.client.client import AdminClient, AdminError
from loramux.admin.client.named_adapter import NamedAdapter
from loramux.admin.client.push import FILE_NAMES, FURTHER_NAMES, Progress


class PullRefused(Exception):
    """The files cannot be downloaded or written. The message says why."""


@dataclass(frozen=True, slots=True)
class PulledVersion:
    model: str
    version: int
    digest: str
    version_digest: str
    directory: Path


def pull_version(
    client: AdminClient,
    named: NamedAdapter,
    directory: Path,
    *,
    may_replace: bool = False,
    progress: Progress = lambda _what, _num_bytes: None,
) -> PulledVersion:
    """Write the files of a version into `directory`.

    If `named` has no version, the default alias's version with the highest weight is used. Each file is checked against
    its declared SHA-256. Files appear in `directory` only when all are complete. With `may_replace`, existing files are
    overwritten, and optional files that are not part of the version are deleted. Raises PullRefused or AdminError.
    """
    number = named.version if named.version is not None else _default(named)
    report = client.get(f"{named.version_path(number)}/report")
    declared = {file["name"]: file for file in report["files"]}
    names = [*FILE_NAMES, *(name for name in FURTHER_NAMES if name in declared)]
    taken = [name for name in (*FILE_NAMES, *FURTHER_NAMES) if (directory / name).exists()]
    if taken and not may_replace:
        raise PullRefused(f"{directory} already has a {taken[0]}: choose another directory, or use --force")
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = {name: directory / f".{name}.{os.getpid()}" for name in names}
    try:
        for name, path in unfinished.items():
            _download(client, f"{named.version_path(number)}/files/{name}", path, declared[name]["sha256"], progress)
        for name, path in unfinished.items():
            path.replace(directory / name)
        # If a file of another version remained, pushing the directory would create a third version.
        for name in set(FURTHER_NAMES).difference(names):
            (directory / name).unlink(missing_ok=True)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
    model = f"{named.document['model']}@{number}"
    return PulledVersion(model, number, report["digest"], report["version_digest"], directory)


def _default(named: NamedAdapter) -> int:
    targets = named.document["aliases"].get(DEFAULT_ALIAS)
    if not targets:
        raise AdminError(404, f"{named.document['model']} has no ready version", "version_not_found", "model")
    return int(max(targets, key=lambda target: (target["weight"], target["version"]))["version"])


def _download(client: AdminClient, path: str, place: Path, sha256: str, progress: Progress) -> None:
    hashed = hashlib.sha256()
    with client.stream(path) as chunks, place.open("wb") as out:
        for chunk in chunks:
            hashed.update(chunk)
            out.write(chunk)
            progress("pull", len(chunk))
    if hashed.hexdigest() != sha256:
        raise PullRefused("the downloaded bytes do not match the SHA-256 of the uploaded file: try again")

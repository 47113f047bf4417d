"""Adapter files in a repository of a Hugging Face hub, at one commit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import FURTHER_FILES, MLX_FILE, SMALL_TOKENIZER_FILES, UPLOAD_FILES
from loramux.adapter_store.formats.packed.sharded_tensors import INDEX_FILE, is_shard
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_files import HubFile

_FILES = (*UPLOAD_FILES, *FURTHER_FILES, *SMALL_TOKENIZER_FILES, INDEX_FILE, MLX_FILE)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_URL = re.compile(
    rf"hf://(?P<repository>{_NAME}/{_NAME})@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}})(?:#(?P<commit>[0-9a-f]{{40}}))?"
)


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A revision of a repository and, if known, the commit that it must point to."""

    repository: str
    revision: str
    commit: str | None

    @classmethod
    def parse(cls, url: str) -> HubLocation | None:
        """Parse `hf://OWNER/NAME@REVISION[#COMMIT]`, or return None for any other form."""
        match = _URL.fullmatch(url)
        return None if match is None else cls(match["repository"], match["revision"], match["commit"])

    @property
    def repository_url(self) -> str:
        return f"hf://{self.repository}"

    @property
    def url(self) -> str:
        commit = "" if self.commit is None else f"#{self.commit}"
        return f"{self.repository_url}@{self.revision}{commit}"

    def at(self, commit: str) -> HubLocation:
        return replace(self, commit=commit)

    def resolve(self, hub: HubClient) -> str:
        """Return the revision's commit. Raises AdapterRejected if it is not the expected commit."""
        commit = hub.resolve(self.repository, self.revision)
        if self.commit not in (None, commit):
            raise AdapterRejected(
                "source_moved",
                f"the revision {self.revision} is now the commit {commit}, not {self.commit}: create the version again",
                "source",
            )
        return commit


class HubSource:
    """The adapter files in a repository at a commit; see `Source`. Each file is verified against the hub's hash."""

    def __init__(self, hub: HubClient, location: HubLocation) -> None:
        assert location.commit is not None
        self._hub = hub
        self._repository, self._commit = location.repository, location.commit
        self._files = hub.files(self._repository, self._commit, _FILES)

    @property
    def facts(self) -> dict[str, Any]:
        return {"source_commit": self._commit}

    def has(self, name: str) -> bool:
        return name in self._files

    def size(self, name: str, max_bytes: int) -> int:
        file = self._file(name)
        if file.size > max_bytes:
            raise AdapterRejected("file_too_large", f"the file is larger than {max_bytes} bytes", name)
        return file.size

    def fetch_file(self, name: str, destination: Path, max_bytes: int) -> None:
        file = self._file(name)
        num_bytes = self.size(name, max_bytes)
        hasher = file.digest.hasher(num_bytes)
        with destination.open("wb") as out:
            for chunk in self._hub.chunks(self._repository, self._commit, name, num_bytes):
                if out.tell() + len(chunk) > num_bytes:
                    raise AdapterRejected("size_mismatch", "the file is larger than the hub declares", name)
                out.write(chunk)
                hasher.update(chunk)
        if destination.stat().st_size != num_bytes:
            raise AdapterRejected("size_mismatch", "the file is smaller than the hub declares", name)
        if hasher.hexdigest() != file.digest.value:
            raise AdapterRejected("checksum_mismatch", "the file does not match the hash that the hub declares", name)

    def _file(self, name: str) -> HubFile:
        if name not in self._files and is_shard(name):
            self._files = {**self._files, **self._hub.files(self._repository, self._commit, (name,))}
        if name not in self._files:
            raise AdapterRejected("source_not_found", "the source has no such file", name)
        return self._files[name]

"""Pulls a base model: what is needed, whether it fits on the disk, the downloads, and the place where it ends up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from loramux.adapter_store.atomic_files import sync_directory
from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.hub.hub_transport import HubTransport, operators_rule
from loramux.adapter_store.pulling.download import Pause, Progress, download, patiently, writing_failed
from loramux.adapter_store.pulling.model_cache import FileRecord, ModelCache, PulledModel
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.adapter_store.pulling.needed_files import needed_files
from loramux.adapter_store.pulling.pull_settings import PullSettings
from loramux.adapter_store.pulling.remote import BucketRemote, HubRemote, Remote, RemoteFile

RESERVE_BYTES = 256 << 20
"""Disk space that a pull leaves free."""

MIN_BYTES_PER_S = 16 << 10
"""Lowest accepted rate of a download, in bytes per second. Operators pull over slow lines, too."""

OpenRemote = Callable[[ModelName, PullSettings], Remote]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """What a pull fetches. `weights` come after the `small` files, which tell whether the model can be served."""

    name: ModelName
    commit: str
    directory: Path
    small: Sequence[RemoteFile]
    weights: Sequence[RemoteFile]
    kept_bytes: int
    """Bytes that need not be fetched, because an interrupted pull or another commit has them."""
    remote: Remote = field(repr=False)

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        return (*self.small, *self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def absent(self) -> list[RemoteFile]:
        """The small files that the directory lacks. An earlier release of loramux may not have fetched them."""
        return [file for file in self.small if not (self.directory / file.name).exists()]

    @property
    def is_complete(self) -> bool:
        return self.directory.is_dir() and not self.absent

    @property
    def missing_bytes(self) -> int:
        if self.directory.is_dir():
            return sum(file.size for file in self.absent)
        return self.num_bytes - self.kept_bytes


def open_remote(name: ModelName, settings: PullSettings) -> Remote:
    if name.kind == "s3":
        return BucketRemote(name.place)
    # Every request has its own transport. Reading the certificates takes longer than a small request.
    rule, certificates = operators_rule(settings.endpoint), httpx.create_ssl_context()
    hub = HubClient(
        settings.endpoint,
        settings.token,
        lambda endpoint: HubTransport(endpoint, is_allowed=rule, certificates=certificates),
        min_bytes_per_s=MIN_BYTES_PER_S,
    )
    return HubRemote(hub, name.place, name.revision)


class Puller:
    """Raises PullRefused, another Refused, or SourceUnavailable if the hub or the bucket cannot be read at the moment.

    Tests replace `open_remote` and `pause`.
    """

    def __init__(
        self, settings: PullSettings, open_remote: OpenRemote = open_remote, pause: Pause = time.sleep
    ) -> None:
        self.settings = settings
        self.cache = ModelCache(settings.models_dir)
        self._open_remote = open_remote
        self._pause = pause

    def plan(self, name: ModelName) -> PullPlan:
        """Ask the source what there is to fetch."""
        if self.settings.is_offline and name.kind == "hf":
            message = f"{name.url} has not been pulled, and HF_HUB_OFFLINE forbids to ask the hub: pull it online first"
            raise PullRefused("not_pulled", message, "model")
        return patiently(lambda: self._plan(name), self._pause)

    def carry_out(
        self,
        plan: PullPlan,
        progress: Progress = lambda _name, _num_bytes: None,
        accept: Callable[[Path], None] = lambda _directory: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> PulledModel:
        """Fetch what is missing, and return the complete model.

        `accept` is called with a directory of the small files before the weights are fetched. It may refuse the model
        by raising an error. `on_wait` is called if another process is pulling from the same place.
        """
        records = {file.name: FileRecord(file.size, _digest_text(file)) for file in plan.files}
        with self.cache.hold(plan.name, on_wait):
            unfinished = self.cache.unfinished(plan.name, plan.commit)
            try:
                if not plan.is_complete:
                    unfinished.mkdir(parents=True, exist_ok=True, mode=0o700)
                if plan.directory.is_dir():
                    self._complete(plan, unfinished, progress)
                else:
                    self._reuse(plan, unfinished, records)
                    self._check_space(plan, plan.files, unfinished)
                    self._fetch(plan, plan.small, unfinished, progress)
                    if plan.small:
                        accept(unfinished)
                    self._fetch(plan, plan.weights, unfinished, progress)
                    sync_directory(unfinished)
                return self.cache.publish(plan.name, plan.commit, records)
            except OSError as error:
                raise writing_failed(error, unfinished) from error

    def _plan(self, name: ModelName) -> PullPlan:
        remote = self._open_remote(name, self.settings)
        small, weights = needed_files(remote, name)
        commit = remote.commit([*small, *weights])
        if name.is_pinned and commit != name.revision:
            raise PullRefused("source_moved", f"the hub answers with commit {commit} for {name.url}", "model")
        unfinished = self.cache.unfinished(name, commit)
        kept = 0
        for file in (*small, *weights):
            is_elsewhere = self.cache.equal_file(name, file.name, FileRecord(file.size, _digest_text(file)))
            kept += file.size if is_elsewhere else min(file.size, _kept_bytes(unfinished, file.name))
        return PullPlan(
            name=name,
            commit=commit,
            directory=self.cache.directory(name, commit),
            small=small,
            weights=weights,
            kept_bytes=kept,
            remote=remote,
        )

    def _complete(self, plan: PullPlan, unfinished: Path, progress: Progress) -> None:
        """Add the small files that a directory of weights lacks. A server may be reading the directory."""
        absent = plan.absent
        if not absent:
            return
        self._check_space(plan, absent, unfinished)
        self._fetch(plan, absent, unfinished, progress)
        for file in absent:
            into = plan.directory / file.name
            into.parent.mkdir(exist_ok=True)
            (unfinished / file.name).rename(into)
            sync_directory(into.parent)
        sync_directory(plan.directory)

    def _reuse(self, plan: PullPlan, unfinished: Path, records: dict[str, FileRecord]) -> None:
        """Link files that another commit has, too."""
        for name, record in records.items():
            equal = self.cache.equal_file(plan.name, name, record)
            if equal is not None and not (unfinished / name).exists():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):
                    os.link(equal, unfinished / name)
                    _part(unfinished, name).unlink(missing_ok=True)

    def _check_space(self, plan: PullPlan, files: Sequence[RemoteFile], unfinished: Path) -> None:
        missing = sum(file.size - min(file.size, _kept_bytes(unfinished, file.name)) for file in files)
        free = shutil.disk_usage(unfinished).free
        if missing + RESERVE_BYTES > free:
            message = (
                f"{plan.name.url} needs {missing} more bytes, and {self.cache.root} has {free} free: pulls leave "
                f"{RESERVE_BYTES} free"
            )
            raise PullRefused("disk_full", message)

    def _fetch(self, plan: PullPlan, files: Sequence[RemoteFile], unfinished: Path, progress: Progress) -> None:
        for file in files:
            if (unfinished / file.name).exists():
                continue
            part = _part(unfinished, file.name)
            part.parent.mkdir(parents=True, exist_ok=True)
            download(plan.remote, file, part, progress, self._pause)
            part.rename(unfinished / file.name)


def _part(unfinished: Path, name: str) -> Path:
    return unfinished / f"{name}.part"


def _kept_bytes(unfinished: Path, name: str) -> int:
    for path in (unfinished / name, _part(unfinished, name)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _digest_text(file: RemoteFile) -> str | None:
    return None if file.digest is None else f"{file.digest.algorithm}:{file.digest.value}"

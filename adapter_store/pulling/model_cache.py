"""The directory of pulled base models.

    MODELS/hf/OWNER/NAME/COMMIT/config.json ...       a model, complete
    MODELS/hf/OWNER/NAME/COMMIT.FILE.gguf/FILE.gguf   a GGUF file, complete
    MODELS/hf/OWNER/NAME/unfinished/...               what an interrupted pull has fetched
    MODELS/hf/OWNER/NAME/pulled.json                  which revision is which commit, and the files' hashes
    MODELS/s3/BUCKET/PREFIX/...                       the same for a bucket

A complete directory appears at once, by renaming. Later pulls only add small files that it lacks. Each place has a
lock, so that one process at a time pulls or removes its models.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from loramux.adapter_store.directory_lock import DirectoryBusy, DirectoryLock
from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.pulling.model_name import ModelName

_RECORD = "pulled.json"
_UNFINISHED = "unfinished"

SELECTION = 2
"""Increased when pulls of models in safetensors files fetch further small files."""


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    digest: str | None


class ModelRecord(msgspec.Struct, frozen=True):
    kind: Literal["hf", "s3"]
    place: str
    file: str | None
    commit: str
    pulled_s: int
    files: dict[str, FileRecord]
    selection: int = 1
    """The `SELECTION` of the release that pulled the model."""


class PlaceRecord(msgspec.Struct):
    """All pulled models of a repository or prefix by directory name, and the directories of revisions."""

    models: dict[str, ModelRecord] = {}
    revisions: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A complete model. `revisions` are those that lead to it."""

    record: ModelRecord
    directory: Path
    revisions: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The model's directory, or its first GGUF file."""
        first = self.name.files
        return self.directory / first[0] if first else self.directory

    @property
    def name(self) -> ModelName:
        revision = self.record.commit if self.record.kind == "hf" else ""
        return ModelName(self.record.kind, self.record.place, revision, self.record.file)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.record.files.values())

    @property
    def may_lack_files(self) -> bool:
        """Whether an earlier release, which did not fetch all files that this one fetches, pulled the model."""
        return self.record.file is None and self.record.selection < SELECTION


class ModelCache:
    """Pulled models below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, name: ModelName) -> PulledModel | None:
        """Return the model that the latest pull of this name has fetched."""
        place = self._place(name)
        return _find(place, _read(place), name)

    def models(self) -> list[PulledModel]:
        """Return all complete models, by place."""
        found = []
        for record_file in sorted(self.root.glob(f"*/*/*/{_RECORD}")):
            place = record_file.parent
            record = _read(place)
            for key, model in sorted(record.models.items()):
                if (place / key).is_dir():
                    found.append(PulledModel(model, place / key, _revisions(record, key)))
        return found

    @contextmanager
    def hold(self, name: ModelName, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Lock the name's place. `on_wait` is called if another process has locked it. Raises PullRefused."""
        place = self._place(name)
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = DirectoryLock(place / "lock", patience_s=inf)
            quick = DirectoryLock(place / "lock", patience_s=0)
        except OSError as error:
            raise PullRefused("directory_not_usable", f"{place} cannot be used: {error.strerror}") from error
        try:
            with quick.hold():
                yield
                return
        except DirectoryBusy:
            on_wait()
        with lock.hold():
            yield

    def directory(self, name: ModelName, commit: str) -> Path:
        """Return where the model is once it is complete."""
        return self._place(name) / _key(name, commit)

    def unfinished(self, name: ModelName, commit: str) -> Path:
        return self._place(name) / _UNFINISHED / _key(name, commit)

    def equal_file(self, name: ModelName, file: str, wanted: FileRecord) -> Path | None:
        """Return a file with the same name, size and hash in another model of the place, such as an older commit."""
        if wanted.digest is None:
            return None
        place = self._place(name)
        for key, model in _read(place).models.items():
            path = place / key / file
            if model.files.get(file) == wanted and path.is_file() and path.stat().st_size == wanted.size:
                return path
        return None

    def publish(self, name: ModelName, commit: str, files: dict[str, FileRecord]) -> PulledModel:
        """Make an unfinished model complete, unless it is, and let the name lead to it. Hold the lock."""
        place, key = self._place(name), _key(name, commit)
        if not (place / key).is_dir():
            (place / _UNFINISHED / key).rename(place / key)
        # What is left of other commits of the same name belongs to revisions that have moved since.
        for other in (place / _UNFINISHED).glob(f"*{key.removeprefix(commit)}" if name.file else "?" * len(commit)):
            shutil.rmtree(other, ignore_errors=True)
        record = _read(place)
        new = ModelRecord(name.kind, name.place, name.file, commit, int(time.time()), files, SELECTION)
        if key not in record.models or record.models[key].selection < SELECTION:
            record.models[key] = new
        record.revisions[_revision_key(name)] = key
        _write(place, record)
        found = _find(place, record, name)
        assert found is not None
        return found

    def remove(self, name: ModelName) -> int:
        """Remove the model of this name and what interrupted pulls of the place left. Return the number of freed bytes.

        Raises PullRefused if there is nothing to remove, or a server uses the model.
        """
        place = self._place(name)
        if not place.is_dir():
            raise _not_pulled(name)
        with self.hold(name, _refuse_busy):
            record = _read(place)
            found = _find(place, record, name)
            unfinished = place / _UNFINISHED
            if found is None and not unfinished.is_dir():
                raise _not_pulled(name)
            num_bytes = _size(unfinished)
            if found is not None:
                _check_unused(found)
                num_bytes += _size(found.directory)
                key = found.directory.name
                record.models.pop(key, None)
                record.revisions = {revision: to for revision, to in record.revisions.items() if to != key}
                _write(place, record)
                # A directory with a temporary name is no model, even if the removal is interrupted.
                found.directory.rename(unfinished.parent / f"{_UNFINISHED}-{key}")
                shutil.rmtree(unfinished.parent / f"{_UNFINISHED}-{key}", ignore_errors=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            return num_bytes

    def _place(self, name: ModelName) -> Path:
        owner, _, rest = name.place.partition("/")
        return self.root / name.kind / owner / quote(rest or "/", safe="")


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep a pulled model from being removed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Network file systems without locks serve models, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _check_unused(model: PulledModel) -> None:
    descriptor = os.open(model.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PullRefused("model_in_use", f"a server uses {model.directory}: stop it first", "model") from None
    finally:
        os.close(descriptor)


def _refuse_busy() -> None:
    raise PullRefused("model_in_use", "another process is pulling this model: stop it first", "model")


def _not_pulled(name: ModelName) -> PullRefused:
    return PullRefused("not_pulled", f"{name.url} has not been pulled", "model")


def _find(place: Path, record: PlaceRecord, name: ModelName) -> PulledModel | None:
    key = _key(name, name.revision) if name.is_pinned else record.revisions.get(_revision_key(name))
    model = None if key is None else record.models.get(key)
    if key is None or model is None or not (place / key).is_dir():
        return None
    return PulledModel(model, place / key, _revisions(record, key))


def _key(name: ModelName, commit: str) -> str:
    """Return the name of a model's directory."""
    return commit if name.file is None else f"{commit}.{quote(name.files[0], safe='')}"


def _revision_key(name: ModelName) -> str:
    return f"{name.revision} {name.files[0] if name.file else ''}"


def _revisions(record: PlaceRecord, key: str) -> tuple[str, ...]:
    """Return the revisions that lead to a directory. A bucket has none."""
    names = (name.partition(" ")[0] for name, to in sorted(record.revisions.items()) if to == key)
    return tuple(filter(None, names))


def _read(place: Path) -> PlaceRecord:
    """Read the record of a place. A damaged record counts as empty. Pulling again repairs it without a download."""
    try:
        return msgspec.json.decode((place / _RECORD).read_bytes(), type=PlaceRecord)
    except (OSError, msgspec.MsgspecError):
        return PlaceRecord({}, {})


def _write(place: Path, record: PlaceRecord) -> None:
    unfinished = place / f".{_RECORD}"
    with unfinished.open("wb") as out:
        out.write(msgspec.json.encode(record))
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(place / _RECORD)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

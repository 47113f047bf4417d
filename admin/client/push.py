"""Pushes a PEFT directory to the server: declares its files, uploads them, and waits for validation."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.missing_files import missing_file
from loramux.adapter_store.formats.version_files.pooling_files import pooling_file
from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary, tokenizer_files
from loramux.admin.client.client import AdminClient, AdminError, Document, ServerUnreachable
from loramux.admin.client.given_files import has_tokenizer, is_given
from loramux.admin.client.retries import is_temporary, retry_read

FILE_NAMES = ("adapter_config.json", "adapter_model.safetensors")
TEMPLATE_NAME = "chat_template.jinja"
GENERATION_NAME = "generation_config.json"
PARSERS_NAME = "parsers.json"
VOCABULARY_NAME = "added_vocabulary.json"
POOLING_NAME = "pooling.json"
FURTHER_NAMES = (TEMPLATE_NAME, GENERATION_NAME, PARSERS_NAME, VOCABULARY_NAME, POOLING_NAME)
CHUNK_BYTES = 1 << 20

NO_PARSERS: Mapping[str, str] = MappingProxyType({})

_CAPS = ("too_many_open_uploads", "too_many_pending_versions")
"""Error codes of temporary refusals. A retry can succeed once the tenant's other pushes finish."""

Progress = Callable[[str, int], None]


class PushRefused(Exception):
    """The directory is not a valid adapter, the server rejected the adapter, or its version is out of service or was
    not ready in time.

    `code` and `param` say why.
    """

    def __init__(self, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    def envelope(self) -> Document:
        return {"error": {"message": self.message, "code": self.code, "param": self.param}}


@dataclass(frozen=True, slots=True)
class PushedVersion:
    model: str
    version: int
    digest: str
    version_digest: str
    max_rank: int
    warnings: tuple[Document, ...] = ()
    """The warnings of the validation report: probable mistakes that do not prevent serving."""

    @classmethod
    def of(cls, model: str, version: Document) -> PushedVersion:
        """Describe a version, as the server returns it, of the adapter that requests call `model`."""
        warnings = tuple(version["report"].get("warnings", ()))
        return cls(
            model, version["number"], version["digest"], version["version_digest"], version["max_rank"], warnings
        )


def push_adapter(
    client: AdminClient,
    directory: Path,
    tenant: str,
    name: str,
    timeout_s: float = 300.0,
    progress: Progress = lambda _what, _num_bytes: None,
    without: Collection[str] = (),
    parsers: Mapping[str, str] | None = None,
) -> PushedVersion:
    """Upload the adapter in `directory` as the next version of `tenant/name` and wait until it is ready.

    Optional files in the directory are uploaded too, except those named in `without`. `parsers` are settings that take
    precedence over the directory's `parsers.json`. If the directory has a tokenizer, the facts in which it differs from
    the base's become a `chat_template.jinja` and an `added_vocabulary.json`, and files of sentence-transformers become
    a `pooling.json`, unless the directory has these files. `tenant` is a slug or an identifier. A push that fails or is
    interrupted cancels its upload.

    Raises PushRefused if the directory is not an adapter, the server rejects it, an earlier version with the same files
    is out of service, or `timeout_s` passes. Raises AdminError if the server refuses a call.
    """
    with version_files(directory, lambda: client.get("server/vocabulary"), without, parsers or {}) as paths:
        return _push_files(client, paths, tenant, name, timeout_s, progress)


@contextmanager
def version_files(
    directory: Path,
    read_vocabulary: Callable[[], Document],
    without: Collection[str] = (),
    parsers: Mapping[str, str] = NO_PARSERS,
) -> Iterator[list[Path]]:
    """Yield the files of the version that a push of `directory` makes: see `push_adapter`.

    `read_vocabulary` returns the server's document `server/vocabulary`, and is called if the directory has a tokenizer.
    """
    with (
        _with_parsers(adapter_files(directory, without), parsers) as paths,
        _with_pooling(directory, paths, without) as pooled,
        _with_tokenizer(read_vocabulary, directory, pooled, without) as completed,
    ):
        yield completed


def _push_files(
    client: AdminClient, paths: Sequence[Path], tenant: str, name: str, timeout_s: float, progress: Progress
) -> PushedVersion:
    files = [{"name": path.name, "size": path.stat().st_size, "sha256": _sha256(path, progress)} for path in paths]
    adapter = _adapter(client, tenant, name)
    path_of_uploads = f"adapters/{adapter['id']}/uploads"
    upload = _await_room(lambda: client.post(path_of_uploads, {"files": files}), timeout_s)
    ways = {file["name"]: file for file in upload["files"]}
    with _cancelled_on_failure(client, f"{path_of_uploads}/{upload['id']}"):
        for path in paths:
            _send(client, path, ways[path.name], progress)
        version = _make_version(client, adapter, {"upload_id": upload["id"]}, timeout_s)
    return _ready(client, adapter, version, timeout_s)


def register_source(
    client: AdminClient, source: str, tenant: str, name: str, timeout_s: float = 300.0
) -> PushedVersion:
    """Let the server read the next version from a bucket or hub, such as `s3://BUCKET/PREFIX`.

    Requires a platform administrator's key and a source that the operator allows. Raises PushRefused or AdminError.
    """
    adapter = _adapter(client, tenant, name)
    version = _make_version(client, adapter, {"source": source}, timeout_s)
    return _ready(client, adapter, version, timeout_s)


def _make_version(client: AdminClient, adapter: Document, files: Document, timeout_s: float) -> Document:
    return _await_room(lambda: client.post(f"adapters/{adapter['id']}/versions", files), timeout_s)


def _await_room(call: Callable[[], Document], timeout_s: float) -> Document:
    """Retry the call for up to `timeout_s` while the tenant is at its limit of concurrent pushes."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except AdminError as error:
            pause_s = error.retry_after_s or 1
            if error.code not in _CAPS or time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)


@contextmanager
def _cancelled_on_failure(client: AdminClient, path: str) -> Iterator[None]:
    """Cancel the upload if the block fails or is interrupted, so that it stops counting against the tenant's limit."""
    try:
        yield
    except BaseException:
        with suppress(AdminError, ServerUnreachable):
            client.delete(path)
        raise


def _ready(client: AdminClient, adapter: Document, version: Document, timeout_s: float) -> PushedVersion:
    """Wait until a version is ready. Raises PushRefused."""
    version = _settled(client, f"adapters/{adapter['id']}/versions/{version['number']}", timeout_s)
    _check_ready(version)
    # The caller may have given the tenant's identifier, but model names use its slug.
    return PushedVersion.of(adapter["model"], version)


@contextmanager
def _with_parsers(paths: list[Path], parsers: Mapping[str, str]) -> Iterator[list[Path]]:
    """Yield the files, with the settings in `parsers` merged into `parsers.json`."""
    if not parsers:
        yield paths
        return
    own = next((path for path in paths if path.name == PARSERS_NAME), None)
    try:
        chosen = {} if own is None else json.loads(own.read_bytes())
    except ValueError:
        chosen = None
    if not isinstance(chosen, dict):
        raise PushRefused(f"{own} is not a JSON object", "invalid_json", PARSERS_NAME)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / PARSERS_NAME
        path.write_text(json.dumps({**chosen, **parsers}, sort_keys=True) + "\n")
        yield [other for other in paths if other != own] + [path]


@contextmanager
def _with_pooling(directory: Path, paths: list[Path], without: Collection[str]) -> Iterator[list[Path]]:
    """Yield the files, with the `pooling.json` that follows from the files of sentence-transformers."""
    try:
        files = {} if POOLING_NAME in without else pooling_file(directory)
    except AdapterRejected as error:
        raise PushRefused(error.message, error.code, error.param) from None
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        yield [*paths, *(Path(scratch) / name for name in files)]


@contextmanager
def _with_tokenizer(
    read_vocabulary: Callable[[], Document], directory: Path, paths: list[Path], without: Collection[str]
) -> Iterator[list[Path]]:
    """Yield the files, with those that follow from the directory's tokenizer."""
    if not has_tokenizer(directory) or {TEMPLATE_NAME, VOCABULARY_NAME} <= set(without):
        yield paths
        return
    facts = read_vocabulary()
    base = BaseVocabulary(**{field.name: facts[field.name] for field in fields(BaseVocabulary)})
    try:
        files = tokenizer_files(directory, base, without)
    except AdapterRejected as error:
        raise PushRefused(error.message, error.code, error.param) from None
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        yield [path for path in paths if path.name not in files] + [Path(scratch) / name for name in files]


def num_bytes_of(directory: Path, without: Collection[str] = ()) -> int:
    """Return how many bytes a push of this directory reads. Each file is read twice: to hash it and to upload it."""
    return 2 * sum(path.stat().st_size for path in adapter_files(directory, without))


def adapter_files(directory: Path, without: Collection[str] = ()) -> list[Path]:
    """Return the files to upload, the two required files first.

    Raises PushRefused if a required file is missing, or OSError if a file is not a regular file.
    """
    further = [directory / file_name for file_name in FURTHER_NAMES if file_name not in without]
    return [_file_of(directory, file_name) for file_name in FILE_NAMES] + list(filter(is_given, further))


def _file_of(directory: Path, file_name: str) -> Path:
    path = directory / file_name
    if is_given(path):
        return path
    code, message, param = missing_file(directory, file_name)
    raise PushRefused(message, code, param)


def _adapter(client: AdminClient, tenant: str, name: str) -> Document:
    found = client.get("adapters", tenant=tenant, name=name)["data"]
    if found:
        return dict(found[0])
    try:
        return client.post("adapters", {"tenant": tenant, "name": name})
    except AdminError as error:
        # Another client created the adapter first. Use that adapter.
        if error.status != 409:
            raise
    return dict(client.get("adapters", tenant=tenant, name=name)["data"][0])


def _send(client: AdminClient, path: Path, way: Document, progress: Progress) -> None:
    """Upload a file, whole or in parts, to the server or, if the server returned a presigned URL, to the blob store."""
    size = path.stat().st_size
    if "parts" in way:
        for number, part in enumerate(way["parts"]):
            begin = number * way["part_size"]
            _persist(partial(_put_part, client, part, path, begin, min(size, begin + way["part_size"]), progress))
    elif "method" in way:
        _persist(partial(_put_part, client, way, path, 0, size, progress))
    else:
        _persist(lambda: client.put_bytes(way["url"], size, _chunks(path, "upload", progress)))


def _put_part(client: AdminClient, way: Document, path: Path, begin: int, end: int, progress: Progress) -> None:
    client.put_presigned(way, _chunks(path, "upload", progress, begin, end))


def _persist(send: Callable[[], None]) -> None:
    """Call `send`, and retry if the server is busy or the connection breaks. Uploading a file twice is safe."""
    for pause_s in (0.5, 2.0, 5.0):
        try:
            return send()
        except (AdminError, ServerUnreachable) as error:
            if not is_temporary(error):
                raise
        time.sleep(pause_s)
    return send()


def _check_ready(version: Document) -> None:
    """Raise PushRefused unless the version can be served."""
    if version["state"] == "rejected":
        error = version["error"]
        raise PushRefused(error["message"], error["code"], error["param"])
    if version["state"] != "ready":
        raise PushRefused(
            f"version {version['number']} already has these files and is {version['state']}",
            f"version_{version['state']}",
            None,
        )


def _settled(client: AdminClient, path: str, timeout_s: float) -> Document:
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        version = retry_read(partial(client.get, path), deadline - time.monotonic())
        if version["state"] not in ("pending", "validating"):
            return version
        if time.monotonic() > deadline:
            raise PushRefused(
                f"version {version['number']} is still {version['state']} after {timeout_s:.0f} s; "
                "validation continues on the server: check later with 'loramux jobs list'",
                "timeout",
                None,
            )
        time.sleep(pause_s)
        pause_s = min(1.0, pause_s * 1.5)


def _chunks(path: Path, what: str, progress: Progress, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    remaining = (path.stat().st_size if end is None else end) - begin
    with path.open("rb") as file:
        file.seek(begin)
        while chunk := file.read(min(CHUNK_BYTES, remaining)):
            remaining -= len(chunk)
            yield chunk
            progress(what, len(chunk))


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path, "read", progress):
        digest.update(chunk)
    return digest.hexdigest()

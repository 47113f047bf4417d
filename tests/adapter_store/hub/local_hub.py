"""A small local Hugging Face hub with a second server for large files, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_a-token-of-the-operator"


def commit_of(files: dict[str, bytes]) -> str:
    """A hash of the files, in the form of a commit."""
    names = {name: _git_hash(content) for name, content in files.items()}
    return hashlib.sha1(repr(sorted(names.items())).encode()).hexdigest()


@dataclass
class LocalHub:
    """Repositories by name, each with its commits and revisions. `faults` replaces answers, by the last part of the
    path.
    """

    url: str
    store_url: str
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Callable[[Answer], None]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """The path and the Authorization header of each request."""
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """The path and the Range header of each request that has one."""
    has_ranges: bool = True
    has_metadata: bool = True
    """False for a mirror that lists only the names of files."""
    has_resolve_cache: bool = False
    """True to redirect downloads of small files to another path of the hub, as the hub does."""

    def push(self, repository: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Move a revision to a new commit with these files, and return the commit."""
        commit = commit_of(files)
        self.commits[repository, commit] = files
        self.revisions[repository, revision] = self.revisions[repository, commit] = commit
        return commit


class Answer:
    """An answer before it is sent. A fault can change it."""

    def __init__(self, status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.body = body
        self.headers = headers or {}
        self.num_declared: int | None = None
        """Declared length, if it differs from the true one."""

    @classmethod
    def json(cls, document: Any) -> Answer:
        return cls(200, json.dumps(document).encode(), {"content-type": "application/json"})


@contextmanager
def running_hub() -> Iterator[LocalHub]:
    hub = LocalHub("", "")

    class Hub(_Handler):
        def answer(self, path: str, form: dict[str, list[str]]) -> Answer:
            return _hub_answer(hub, path, form, self.headers.get("authorization"))

    class Store(_Handler):
        def answer(self, path: str, form: dict[str, list[str]]) -> Answer:
            _, _, owner, name, commit, file = path.split("/", 5)
            return Answer(200, hub.commits[f"{owner}/{name}", commit][file])

    for handler in (Hub, Store):
        handler.hub = hub
    with _serving(Hub) as hub.url, _serving(Store) as hub.store_url:
        yield hub


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # Print nothing about a client that leaves before its answer.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def _serving(handler: type[_Handler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub

    def answer(self, path: str, form: dict[str, list[str]]) -> Answer:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._respond({})

    def do_HEAD(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        self._respond(parse_qs(self.rfile.read(int(self.headers["content-length"])).decode()))

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _respond(self, form: dict[str, list[str]]) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((path, self.headers.get("authorization", "")))
        answer = self.answer(path, form)
        self._cut_to_range(path, answer)
        for part, fault in list(self.hub.faults.items()):
            if part in path:
                fault(answer)
        self.send_response(answer.status)
        declared = len(answer.body) if answer.num_declared is None else answer.num_declared
        for name, value in {"content-length": str(declared), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _cut_to_range(self, path: str, answer: Answer) -> None:
        asked = self.headers.get("range", "")
        if asked:
            self.hub.ranges.append((path, asked))
        if asked and answer.status == 200 and self.hub.has_ranges:
            start, size = int(asked.removeprefix("bytes=").partition("-")[0]), len(answer.body)
            answer.status, answer.body = (206, answer.body[start:]) if start < size else (416, b"")
            answer.headers["content-range"] = f"bytes {start}-{size - 1}/{size}"


def _hub_answer(hub: LocalHub, path: str, form: dict[str, list[str]], authorization: str | None) -> Answer:
    parts = [unquote(part) for part in path.split("/")[1:]]
    is_api = parts[:2] == ["api", "models"]
    if parts[:3] == ["api", "resolve-cache", "models"]:
        _, _, _, owner, name, commit, *rest = parts
        content = hub.commits[f"{owner}/{name}", commit]["/".join(rest)]
        return Answer(200, content, {"etag": f'"{_git_hash(content)}"', "x-repo-commit": commit})
    owner, name, verb, revision, *rest = parts[2:] if is_api else parts
    file = "/".join(rest)
    repository = f"{owner}/{name}"
    if repository in hub.renamed:
        return Answer(307, headers={"location": f"{hub.url}{path.replace(repository, hub.renamed[repository])}"})
    if repository in hub.private and authorization != f"Bearer {TOKEN}":
        return Answer(401, headers={"x-error-code": "RepoNotFound"})
    commit = hub.revisions.get((repository, revision))
    if commit is None:
        return Answer(404, headers={"x-error-code": "RevisionNotFound"})
    files = hub.commits[repository, commit]
    if verb == "revision":
        siblings = [_sibling(path, files[path] if hub.has_metadata else None) for path in sorted(files)]
        return Answer.json({"_id": "0", "id": repository, "sha": commit, "siblings": siblings})
    if verb == "tree":
        return Answer.json([_entry(path, content) for path, content in sorted(files.items())])
    if verb == "paths-info":
        return Answer.json([_entry(path, files[path]) for path in form["paths"] if path in files])
    content = files.get(file)
    if content is None:
        return Answer(404, headers={"x-error-code": "EntryNotFound", "x-repo-commit": commit})
    if hub.has_resolve_cache and not _is_large(file):
        location = f"/api/resolve-cache/models/{repository}/{commit}/{file}?etag=%22{_git_hash(content)}%22"
        linked = {"x-linked-etag": f'"{_git_hash(content)}"', "x-repo-commit": commit}
        return Answer(307, headers={"location": location, **linked})
    if not _is_large(file):
        return Answer(200, content, {"x-repo-commit": commit, "etag": f'"{_git_hash(content)}"'})
    headers = {
        "location": f"{hub.store_url}/store/{repository}/{commit}/{file}?signature=secret",
        "x-repo-commit": commit,
        "x-linked-size": str(len(content)),
        "x-linked-etag": f'"{hashlib.sha256(content).hexdigest()}"',
    }
    return Answer(302, headers=headers)


def _sibling(path: str, content: bytes | None) -> dict[str, Any]:
    """A file in the answer about a revision, with sizes and hashes if the request has `blobs=true`."""
    if content is None:
        return {"rfilename": path}
    sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _git_hash(content)}
    if _is_large(path):
        digest = hashlib.sha256(content).hexdigest()
        sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return sibling


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
    if _is_large(path):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf"))


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

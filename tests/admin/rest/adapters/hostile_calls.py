from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from tests.adapter_store.validation.hostile import MARK, TARGET

Document = dict[str, Any]


@dataclass(frozen=True)
class Visit:
    http: httpx.AsyncClient
    adapter_id: str
    foreign_adapter_id: str
    foreign_key: str
    contents: dict[str, bytes]
    expire: Callable[[str], None]
    """Makes an upload expire."""

    def declared(self) -> list[Document]:
        return [
            {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in self.contents.items()
        ]

    async def declare(self, body: Any, adapter_id: str | None = None, **options: Any) -> httpx.Response:
        """A `bytes` body is sent unchanged."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"/admin/v1/adapters/{adapter_id or self.adapter_id}/uploads"
        return await self.http.post(url, content=content, **options)

    async def upload(self, adapter_id: str | None = None) -> Document:
        """Declare the valid files and return the upload's document."""
        response = await self.declare({"files": self.declared()}, adapter_id)
        assert response.status_code == 201, response.text
        return dict(response.json())

    async def put(self, upload: Document, name: str, content: bytes, **options: Any) -> httpx.Response:
        return await self.http.put(f"{self.uploads_url(upload)}/files/{name}", content=content, **options)

    async def put_all(self, upload: Document) -> None:
        for name, content in self.contents.items():
            response = await self.put(upload, name, content)
            assert response.status_code == 204, response.text

    async def use(self, body: Any, adapter_id: str | None = None) -> httpx.Response:
        """A `bytes` body is sent unchanged."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(f"/admin/v1/adapters/{adapter_id or self.adapter_id}/versions", content=content)

    def uploads_url(self, upload: Document) -> str:
        return f"/admin/v1/adapters/{upload['adapter_id']}/uploads/{upload['id']}"


@dataclass(frozen=True)
class HostileCall:
    """`call` prepares the server, makes the invalid call, and returns its response. `leaves` has the last part of the
    key of each blob that remains.
    """

    name: str
    status: int
    code: str
    call: Callable[[Visit], Awaitable[httpx.Response]]
    leaves: tuple[str, ...] = ()


def _body(name: str, code: str, body: Any, status: int = 400) -> HostileCall:
    return HostileCall(f"declare: {name}", status, code, lambda visit: visit.declare(body))


def _member(title: str, code: str, /, at: int = 1, **changes: Any) -> HostileCall:
    """Change fields in the declaration of the configuration file (0) or of the tensors file (1)."""

    async def call(visit: Visit) -> httpx.Response:
        files = visit.declared()
        files[at] |= changes
        return await visit.declare({"files": files})

    return HostileCall(f"declare: {title}", 400, code, call)


def _files(name: str, code: str, change: Callable[[list[Document]], list[Document]]) -> HostileCall:
    async def call(visit: Visit) -> httpx.Response:
        return await visit.declare({"files": change(visit.declared())})

    return HostileCall(f"declare: {name}", 400, code, call)


DECLARATIONS = [
    _body("nothing", "invalid_json", b""),
    _body("not JSON", "invalid_json", MARK.encode()),
    _body("a list", "invalid_json", [MARK]),
    _body("null", "invalid_json", None),
    _body("cut off", "invalid_json", b'{"files": ['),
    _body("NaN", "invalid_json", b'{"files": NaN}'),
    _body("not UTF-8", "invalid_json", b'{"files": "\xff"}'),
    _body("byte order mark", "invalid_json", b'\xef\xbb\xbf{"files": []}'),
    _body("half a character", "invalid_json", b'{"files": "\\ud800"}'),
    _body("10000 lists deep", "invalid_json", b"[" * 10_000),
    _body("files given twice", "invalid_json", b'{"files": [], "files": []}'),
    _body("name given twice", "invalid_json", b'{"files": [{"name": "a", "name": "kilroy"}]}'),
    _body("over 64 kilobytes", "payload_too_large", b" " * 65_537, status=413),
    _body("no files", "missing_required_parameter", {}),
    _body("files are null", "invalid_type", {"files": None}),
    _body("files are an object", "invalid_type", {"files": {MARK: 1}}),
    _body("file is a text", "invalid_type", {"files": [MARK]}),
    _body("file without anything", "missing_required_parameter", {"files": [{}]}),
    _body("a path to fetch from", "unknown_parameter", {"files": [], "url": f"s3://{MARK}/"}),
    _body("a million files", "invalid_value", {"files": [{"name": MARK, "size": 1, "sha256": "0" * 64}] * 17}),
    _files("an empty list", "invalid_files", lambda files: []),
    _files("the configuration alone", "invalid_files", lambda files: files[:1]),
    _files("the tensors alone", "invalid_files", lambda files: files[1:]),
    _files("the tensors twice", "invalid_files", lambda files: [files[1], files[1]]),
    _files("a third file", "invalid_files", lambda files: [*files, {**files[0], "name": MARK}]),
    *(
        _member(f"file called {label}", "invalid_files", name=name)
        for label, name in {
            "adapter_model.bin": "adapter_model.bin",
            "as a traversal": "../../etc/kilroy",
            "as a path": f"/{TENSORS_FILE}",
            "as a Windows path": "C:\\kilroy",
            "nothing": "",
            "in capitals": TENSORS_FILE.upper(),
            "with a NUL": TENSORS_FILE + "\x00",
            "with a line break": TENSORS_FILE + "\n",
            "the wrong way round": "\u202e" + TENSORS_FILE,
            "in look-alikes": TENSORS_FILE.replace("a", "а"),
            "by a long name": MARK * 1000,
        }.items()
    ),
    _member("name is a number", "invalid_type", name=7),
    _member("size 0", "invalid_size", size=0),
    _member("size -1", "invalid_size", size=-1),
    _member("size above the largest adapter", "file_too_large", size=TARGET.max_tensors_bytes + 1),
    _member("size above the largest configuration", "file_too_large", at=0, size=(1 << 20) + 1),
    _member("size of 2**63", "file_too_large", size=2**63),
    _member("size of 100 digits", "file_too_large", size=10**99),
    _member("size is a float", "invalid_type", size=10.0),
    _member("size is a text", "invalid_type", size="10"),
    _member("size is a truth", "invalid_type", size=True),
    _member("size is null", "invalid_type", size=None),
    _member("short SHA-256", "invalid_sha256", sha256="0" * 63),
    _member("long SHA-256", "invalid_sha256", sha256="0" * 65),
    _member("SHA-256 in capitals", "invalid_sha256", sha256="A" * 64),
    _member("SHA-256 with a line break", "invalid_sha256", sha256="0" * 64 + "\n"),
    _member("SHA-256 in other digits", "invalid_sha256", sha256="٣" * 64),
    _member("SHA-256 as a path", "invalid_sha256", sha256=f"../../{MARK}"),
    _member("SHA-256 is a number", "invalid_type", sha256=0),
    _member("unknown field", "unknown_parameter", path=f"/etc/{MARK}"),
]


async def _put(
    visit: Visit, change: Callable[[bytes], bytes], name: str = TENSORS_FILE, **options: Any
) -> httpx.Response:
    return await visit.put(await visit.upload(), name, change(visit.contents[name]), **options)


async def _put_as(visit: Visit, name: str) -> httpx.Response:
    return await visit.put(await visit.upload(), name, visit.contents[TENSORS_FILE])


async def _put_to_unknown(visit: Visit) -> httpx.Response:
    return await visit.put({**await visit.upload(), "id": f"upl_{MARK}"}, TENSORS_FILE, b"x")


async def _put_to_foreign(visit: Visit) -> httpx.Response:
    """Send a file to another tenant's upload through the path of the client's own adapter."""
    upload = await visit.upload(visit.foreign_adapter_id)
    return await visit.put({**upload, "adapter_id": visit.adapter_id}, TENSORS_FILE, visit.contents[TENSORS_FILE])


async def _put_by_foreigner(visit: Visit) -> httpx.Response:
    """Send a file to the client's upload with another tenant's administrator key."""
    headers = {"authorization": f"Bearer {visit.foreign_key}"}
    return await visit.put(await visit.upload(), TENSORS_FILE, visit.contents[TENSORS_FILE], headers=headers)


async def _put_without_key(visit: Visit) -> httpx.Response:
    return await visit.put(await visit.upload(), TENSORS_FILE, b"x", headers={"authorization": ""})


async def _put_too_late(visit: Visit) -> httpx.Response:
    upload = await visit.upload()
    visit.expire(upload["id"])
    return await visit.put(upload, TENSORS_FILE, visit.contents[TENSORS_FILE])


async def _put_as_form(visit: Visit) -> httpx.Response:
    upload = await visit.upload()
    files = {"file": (MARK, visit.contents[TENSORS_FILE])}
    return await visit.http.put(f"{visit.uploads_url(upload)}/files/{TENSORS_FILE}", files=files)


async def _put_compressed(visit: Visit) -> httpx.Response:
    return await _put(visit, gzip.compress, headers={"content-encoding": "gzip"})


def _other_bytes(name: str, code: str, change: Callable[[bytes], bytes], file: str = TENSORS_FILE) -> HostileCall:
    return HostileCall(f"put: {name}", 400, code, lambda visit: _put(visit, change, file))


PUTS = [
    _other_bytes("a byte short", "size_mismatch", lambda content: content[:-1]),
    _other_bytes("a byte long", "size_mismatch", lambda content: content + b"x"),
    _other_bytes("nothing", "size_mismatch", lambda content: b""),
    _other_bytes("megabytes more", "size_mismatch", lambda content: bytes(8 << 20)),
    _other_bytes("one bit differs", "checksum_mismatch", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    _other_bytes("zeros", "checksum_mismatch", lambda content: bytes(len(content))),
    _other_bytes("another configuration", "checksum_mismatch", lambda content: content.swapcase(), CONFIG_FILE),
    HostileCall("put: as a form", 400, "size_mismatch", _put_as_form),
    HostileCall("put: compressed", 415, "unsupported_content_encoding", _put_compressed),
    HostileCall("put: a file that was not declared", 404, "upload_not_found", lambda v: _put_as(v, f"{MARK}.bin")),
    HostileCall("put: a traversal", 404, "upload_not_found", lambda v: _put_as(v, "..%5c..%5cetc%5ckilroy")),
    HostileCall("put: a name with a NUL", 404, "upload_not_found", lambda v: _put_as(v, f"{TENSORS_FILE}%00")),
    HostileCall("put: to no upload", 404, "upload_not_found", _put_to_unknown),
    HostileCall("put: to another's upload", 404, "upload_not_found", _put_to_foreign),
    HostileCall("put: with another's key", 404, "adapter_not_found", _put_by_foreigner),
    HostileCall("put: without a key", 401, "missing_api_key", _put_without_key),
    HostileCall("put: too late", 400, "upload_expired", _put_too_late),
]


def _use(name: str, status: int, code: str, body: Any) -> HostileCall:
    return HostileCall(f"use: {name}", status, code, lambda visit: visit.use(body))


async def _use_empty(visit: Visit) -> httpx.Response:
    return await visit.use({"upload_id": (await visit.upload())["id"]})


async def _use_half(visit: Visit) -> httpx.Response:
    upload = await visit.upload()
    await visit.put(upload, CONFIG_FILE, visit.contents[CONFIG_FILE])
    return await visit.use({"upload_id": upload["id"]})


async def _use_foreign(visit: Visit) -> httpx.Response:
    return await visit.use({"upload_id": (await visit.upload(visit.foreign_adapter_id))["id"]})


async def _use_too_late(visit: Visit) -> httpx.Response:
    upload = await visit.upload()
    visit.expire(upload["id"])
    return await visit.use({"upload_id": upload["id"]})


USES = [
    _use("nothing", 400, "invalid_json", b""),
    _use("a list", 400, "invalid_json", [MARK]),
    _use("no upload", 400, "missing_required_parameter", {}),
    _use("upload is null", 400, "missing_required_parameter", {"upload_id": None}),
    _use("upload is a number", 400, "invalid_type", {"upload_id": 7}),
    _use("upload is a list", 400, "invalid_type", {"upload_id": [MARK]}),
    _use("upload given twice", 400, "invalid_json", b'{"upload_id": "a", "upload_id": "kilroy"}'),
    _use("a path to register", 400, "unknown_parameter", {"upload_id": MARK, "path": "/etc/kilroy"}),
    _use("unknown upload", 404, "upload_not_found", {"upload_id": f"upl_{MARK}"}),
    _use("upload with a NUL", 404, "upload_not_found", {"upload_id": f"upl_{MARK}\x00"}),
    _use("upload that leads upwards", 404, "upload_not_found", {"upload_id": "../../kilroy"}),
    _use("upload of SQL", 404, "upload_not_found", {"upload_id": "' OR '1'='1"}),
    _use("upload of 60000 letters", 404, "upload_not_found", {"upload_id": MARK * 10_000}),
    HostileCall("use: nothing was sent", 400, "upload_incomplete", _use_empty),
    HostileCall("use: half was sent", 400, "upload_incomplete", _use_half, leaves=(CONFIG_FILE,)),
    HostileCall("use: another's upload", 404, "upload_not_found", _use_foreign),
    HostileCall("use: too late", 400, "upload_expired", _use_too_late),
]

CALLS = [*DECLARATIONS, *PUTS, *USES]

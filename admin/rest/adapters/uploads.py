"""`/adapters/{id}/uploads`: declare the files, then send the bytes of each. These routes do not parse the files."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Literal, NotRequired

import anyio
import anyio.from_thread
import anyio.to_thread
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from loramux.adapter_store.blobs.interface import PresignedParts, PresignedPut
from loramux.adapter_store.registry.records import Adapter, Upload, UploadFile
from loramux.admin.rest.access import Developer, Reader, Services
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.bodies import NewUpload, read_json
from loramux.admin.rest.idempotency import keep_answer_until
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, seconds
from loramux.admin.rest.services import AdminServices
from loramux.platform.bodies.request_body import content_encoding
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.requests.openapi import errors, takes, takes_bytes

router = APIRouter(prefix="/adapters/{adapter_id}/uploads", tags=["versions"])

CHUNK_TIMEOUT_S = 30.0
"""A client that sends nothing for this many seconds is disconnected. Until then, it occupies a thread."""
READ_BYTES = 1 << 20
"""Number of bytes that are collected in memory before a thread processes them."""
UPLOAD_TIMEOUT_S = 600.0
"""Maximum time for sending one file, in seconds, even if the transfer never stalls."""


class PresignedRequest(TypedDict):
    """A request to the blob store, to be sent with exactly these headers and without an API key."""

    url: str
    method: str
    headers: dict[str, str]


class FileDocument(TypedDict):
    """A declared file and how to send it: a PUT to this server's `url`, a presigned request, or several presigned
    `parts` of `part_size` bytes."""

    name: str
    size: int
    sha256: str
    url: NotRequired[str]
    method: NotRequired[str]
    headers: NotRequired[dict[str, str]]
    part_size: NotRequired[int]
    parts: NotRequired[list[PresignedRequest]]


class UploadDocument(TypedDict):
    """Declared files that can become a version."""

    id: str
    object: Literal["upload"]
    adapter_id: str
    state: Literal["open", "used"]
    files: list[FileDocument]
    created_at: int
    expires_at: int


@router.post("", status_code=201, openapi_extra=takes(NewUpload), responses=errors(429))
async def create_upload(adapter_id: str, request: Request, services: Services, caller: Developer) -> UploadDocument:
    """Declare the name, size and SHA-256 of each file. The response says how to PUT each file.

    `adapter_config.json` and `adapter_model.safetensors` are required. `chat_template.jinja` (at most 64 KiB),
    `generation_config.json` (at most 16 KiB), `parsers.json` (at most 1 KiB), `added_vocabulary.json` (at most 128 KiB)
    and `pooling.json` (at most 1 KiB) are optional. The version then has its own template, sampling defaults, parsers,
    tokens or pooling of embeddings. An example of `parsers.json` is `{"tool_call_parser": "hermes"}`. The tokens extend
    the base's vocabulary. A file with only a `url` is sent to this server. A file with `method` and `headers` is sent
    to the blob store, with exactly these headers and no key. A large file has `parts` of `part_size` bytes. The last
    part can be shorter. The declared bytes count against `adapter_bytes` until the upload is used, cancelled or
    expired.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    body = await read_json(request, NewUpload)
    files = tuple(UploadFile(file.name, file.size, file.sha256) for file in body.files)
    upload = await services.call(services.adapters.ingest.create_upload, adapter.id, files)
    presigned = await services.call(services.adapters.ingest.presign, upload)
    if presigned:
        # Anyone who has a presigned URL can use it until it expires, so do not store it for longer.
        keep_answer_until(request, upload.expires_us)
    return _describe_upload(upload, presigned, request.scope["root_path"])


@router.put("/{upload_id}/files/{name}", status_code=204, openapi_extra=takes_bytes(), responses=errors(503))
async def put_file(
    adapter_id: str, upload_id: str, name: str, request: Request, services: Services, caller: Developer
) -> Response:
    """Send one file's raw bytes, which must match the declared size and SHA-256."""
    adapter = await find_adapter(services, caller, adapter_id)
    upload = await find_upload(services, adapter, upload_id)
    num_bytes = declared_length(request)
    content_encoding(request)
    chunks = body_chunks(request.stream())
    caller.release_call_slot()
    async with services.slots.uploads.held_slot(adapter.tenant_id):
        # Slots, not threads, limit concurrent uploads, because only a wait for a slot can time out.
        thread = anyio.CapacityLimiter(1)
        await anyio.to_thread.run_sync(
            services.adapters.ingest.put_file, upload.id, name, chunks, num_bytes, limiter=thread
        )
    return Response(status_code=204)


@router.get("")
@paged
async def list_uploads(
    adapter_id: str, request: Request, services: Services, caller: Reader, paging: Paging
) -> ListDocument[UploadDocument]:
    """List an adapter's open uploads."""
    adapter = await find_adapter(services, caller, adapter_id)
    page = await services.call(services.adapters.ingest.upload_rows.list_open, adapter.id, *paging)
    return list_document(page, lambda upload: _describe_upload(upload, {}, request.scope["root_path"]))


@router.delete("/{upload_id}", status_code=204)
async def cancel_upload(adapter_id: str, upload_id: str, services: Services, caller: Developer) -> Response:
    """Cancel an open upload and delete its files, which then no longer count against quotas. A used upload cannot be
    cancelled.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    await services.call(services.adapters.ingest.cancel_upload, adapter.id, upload_id)
    return Response(status_code=204)


async def find_upload(services: AdminServices, adapter: Adapter, upload_id: str) -> Upload:
    """Find an upload of the adapter. Raises the same NotFound whether the upload is missing or belongs to another
    adapter.
    """
    upload = await services.call(services.adapters.ingest.upload_rows.get_upload, upload_id)
    if upload is None or upload.adapter_id != adapter.id:
        raise NotFound("the adapter has no such upload", code="upload_not_found")
    return upload


def declared_length(request: Request) -> int | None:
    """The request's Content-Length, or None if the body is sent in chunks of unknown number."""
    length = request.headers.get("content-length", "")
    # Count the digits first, so that a number with thousands of digits is not parsed.
    return int(length) if length.isdecimal() and length.isascii() and len(length) <= 18 else None


def body_chunks(body: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield the body's chunks to a function on a thread. The client can send only as fast as the function reads."""
    deadline_s = time.monotonic() + UPLOAD_TIMEOUT_S
    while chunk := anyio.from_thread.run(_next_bytes, body, deadline_s):
        yield chunk


async def _next_bytes(body: AsyncIterator[bytes], deadline_s: float) -> bytes:
    """Collect about READ_BYTES of a body, because each call from a thread costs as much as a chunk."""
    parts: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(CHUNK_TIMEOUT_S) as scope:
            while size < READ_BYTES:
                chunk = await anext(body, None)
                if chunk is None:
                    break
                if time.monotonic() > deadline_s:
                    raise InvalidRequest(f"the body took longer than {UPLOAD_TIMEOUT_S:g} s", code="body_timeout")
                parts.append(chunk)
                size += len(chunk)
                scope.deadline = anyio.current_time() + CHUNK_TIMEOUT_S
    except TimeoutError:
        raise InvalidRequest("the body stopped arriving", code="body_timeout") from None
    except ClientDisconnect:
        raise InvalidRequest("the body ended early", code="incomplete_body") from None
    return b"".join(parts)


def _describe_upload(
    upload: Upload, presigned: Mapping[str, PresignedPut | PresignedParts], root_path: str
) -> UploadDocument:
    """`root_path` is the prefix under which a proxy publishes the server."""
    base = f"{root_path}/admin/v1/adapters/{upload.adapter_id}/uploads/{upload.id}/files"
    return {
        "id": upload.id,
        "object": "upload",
        "adapter_id": upload.adapter_id,
        "state": upload.state,
        "files": [_describe_file(file, base, presigned.get(file.name)) for file in upload.files],
        "created_at": seconds(upload.created_us),
        "expires_at": seconds(upload.expires_us),
    }


def _describe_file(file: UploadFile, base: str, presigned: PresignedPut | PresignedParts | None) -> FileDocument:
    document: FileDocument = {"name": file.name, "size": file.size, "sha256": file.sha256}
    if presigned is None:
        return {**document, "url": f"{base}/{file.name}"}
    if isinstance(presigned, PresignedPut):
        return {**document, **_describe_request(presigned)}
    return {
        **document,
        "part_size": presigned.part_bytes,
        "parts": [_describe_request(part) for part in presigned.parts],
    }


def _describe_request(presigned: PresignedPut) -> PresignedRequest:
    return {"url": presigned.url, "method": presigned.method, "headers": dict(presigned.headers)}

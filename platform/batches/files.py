"""`/v1/files`: upload, list, read and delete the files of batches."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO, Literal

import anyio
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from loramux.adapter_store.errors import printable
from loramux.platform.batches.documents import DeletedFile, FileDocument, FileList
from loramux.platform.batches.form_upload import UploadForm, received_form
from loramux.platform.batches.services import Kept, OwnerOfKey
from loramux.platform.batches.tenant_files import MAX_NAME, Listing, Owner, TenantFile, TenantFiles
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.authentication import Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import shown_page
from loramux.platform.requests.openapi import answers_bytes, errors

router = APIRouter(tags=["files"])

MAX_LISTED = 10_000
READ_AT_ONCE = 256 * 1024
"""Number of bytes of a file that are read and sent at a time."""
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2_592_000
"""Bounds of `expires_after[seconds]`, as in OpenAI's API."""
_SECONDS = re.compile(r"[0-9]{1,9}")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

ListedAfter = Annotated[str | None, Query(pattern=r"^[!-~]{1,64}$", description="Start after this identifier.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By time of creation; `desc` lists the newest first.")]

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_LIFETIME_S,
                            "maximum": MAX_LIFETIME_S,
                        },
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", openapi_extra=_FORM, response_model=FileDocument, responses=errors(413))
async def upload_file(request: Request, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Upload a file of requests for a batch, as a form with the fields `file` and `purpose`."""
    files = kept.files
    with kept.transfers.held(owner.tenant_id):
        return await _upload(request, owner, files)


async def _upload(request: Request, owner: Owner, files: TenantFiles) -> Response:
    async with received_form(request, files.scratch, files.max_bytes) as form:
        lifetime_us, name = _checked(form), _name(form)
        if not form.path.stat().st_size:
            raise InvalidRequest("the file is empty", param="file", code="empty_file")
        file = await anyio.to_thread.run_sync(files.create, owner, name, form.path, lifetime_us)
    return json_response(describe_file(file))


@router.get("/v1/files", response_model=FileList)
async def list_files(
    owner: OwnerOfKey,
    services: Services,
    kept: Kept,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Items per page.")] = MAX_LISTED,
    after: ListedAfter = None,
    order: Order = "desc",
    purpose: Annotated[str | None, Query(max_length=64, description="Only files with this purpose.")] = None,
) -> Response:
    """List the files that the key may see."""
    found, has_more = await services.call(kept.files.list, owner, Listing(limit, after, order == "asc"), purpose)
    return json_response(shown_page([dict(describe_file(one)) for one in found], has_more=has_more))


@router.get("/v1/files/{file_id}", response_model=FileDocument)
async def retrieve_file(file_id: str, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Retrieve a file's description."""
    return json_response(describe_file(await services.call(kept.files.get, owner, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=answers_bytes())
async def download_file(file_id: str, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Download a file."""
    file = await services.call(kept.files.get, owner, file_id)

    # A slow reader holds no place, only the space of its copy.
    with kept.transfers.held(owner.tenant_id):
        content = await anyio.to_thread.run_sync(_opened, kept.files, file)
    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(_chunks(content), headers=headers, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", response_model=DeletedFile, responses=errors(409))
async def delete_file(file_id: str, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Delete a file that no unfinished batch needs."""
    await services.call(kept.files.delete, owner, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def describe_file(file: TenantFile) -> FileDocument:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_us // 1_000_000,
        "expires_at": None if file.expires_us is None else file.expires_us // 1_000_000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def _checked(form: UploadForm) -> int | None:
    """Check the form's fields, and return the file's lifetime in microseconds. Raises InvalidRequest."""
    for name in _unknown(form):
        raise InvalidRequest("this is not a parameter of this call", param=name[:100], code="unknown_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("purpose is required", param="purpose", code="missing_required_parameter")
    if purpose != "batch":
        raise InvalidRequest("the only purpose of files is 'batch'", param="purpose")
    anchor, seconds = (form.fields.get(name) for name in _FIELDS[1:])
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("the anchor must be 'created_at'", param="expires_after[anchor]")
    if seconds is None or not _SECONDS.fullmatch(seconds) or not MIN_LIFETIME_S <= int(seconds) <= MAX_LIFETIME_S:
        raise InvalidRequest(
            f"the lifetime must be {MIN_LIFETIME_S} to {MAX_LIFETIME_S} seconds", param="expires_after[seconds]"
        )
    return int(seconds) * 1_000_000


def _opened(files: TenantFiles, file: TenantFile) -> BinaryIO:
    """Open a copy of the file, which no longer has a name and therefore disappears when it is closed."""
    with TemporaryDirectory(dir=files.scratch) as directory:
        path = Path(directory) / "file"
        files.fetch(file, path)
        return path.open("rb")


async def _chunks(content: BinaryIO) -> AsyncIterator[bytes]:
    with content:
        while chunk := await anyio.to_thread.run_sync(content.read, READ_AT_ONCE):
            yield chunk


def _unknown(form: UploadForm) -> Iterator[str]:
    return (name for name in form.fields if name not in _FIELDS)


def _name(form: UploadForm) -> str:
    """A name that can be displayed. Clients may send a path."""
    return printable((form.file_name or "").replace("\\", "/").rpartition("/")[2], MAX_NAME) or "file"

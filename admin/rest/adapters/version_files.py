"""`/adapters/{id}/versions/{n}/files/{name}` and `.../report`: the uploaded files and the validation report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from loramux.adapter_store.ingest.export import ExportedFile
from loramux.adapter_store.registry.records import VersionState
from loramux.admin.rest.access import Reader, Services
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.adapters.versions import Number
from loramux.platform.requests.openapi import answers_bytes, errors

router = APIRouter(prefix="/adapters/{adapter_id}/versions/{number}", tags=["versions"])

DOWNLOAD_TIMEOUT_S = 3600.0
"""Maximum time for downloading one file, in seconds. A copy of the file stays on disk during the download."""


class StoredFile(TypedDict):
    """A file as it was uploaded."""

    name: str
    size: int
    sha256: str


class ReportDocument(TypedDict):
    """The validation report, or the reason for the rejection."""

    object: Literal["validation_report"]
    adapter_id: str
    version_id: str
    number: int
    state: VersionState
    digest: str | None
    version_digest: str | None
    files: list[StoredFile]
    report: dict[str, Any]
    error: dict[str, Any] | None


@router.get("/files/{name}", response_class=Response, responses=answers_bytes() | errors(409))
async def get_file(adapter_id: str, number: Number, name: str, services: Services, caller: Reader) -> Response:
    """Download one file of a ready or archived version as it was uploaded. The ETag is the file's SHA-256."""
    adapter = await find_adapter(services, caller, adapter_id)
    version = await services.call(services.adapters.registry.find_version, adapter.id, number)
    caller.release_call_slot()
    release_slot = await services.slots.downloads.acquire_slot(adapter.tenant_id)
    try:
        # Read on a separate thread, so that a slow object store does not delay other calls. The slots limit the number
        # of such threads.
        thread = anyio.CapacityLimiter(1)
        file = await anyio.to_thread.run_sync(services.adapters.export.open, version, name, limiter=thread)
    except BaseException:
        release_slot()
        raise
    return ExportResponse(file, release_slot)


@router.get("/report")
async def get_report(adapter_id: str, number: Number, services: Services, caller: Reader) -> ReportDocument:
    """Get a version's validation report, or the reason for its rejection. The report is empty until validation has
    finished.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    version = await services.call(services.adapters.registry.find_version, adapter.id, number)
    files = await services.call(services.adapters.export.files, version)
    return {
        "object": "validation_report",
        "adapter_id": version.adapter_id,
        "version_id": version.id,
        "number": version.number,
        "state": version.state,
        "digest": version.digest,
        "version_digest": version.version_digest,
        "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in files],
        "report": {name: value for name, value in version.report.items() if name != "error"},
        "error": version.report.get("error"),
    }


class ExportResponse(StreamingResponse):
    """Sends a file in chunks, and always closes the file and releases its slot."""

    def __init__(self, file: ExportedFile, release_slot: Callable[[], None]) -> None:
        declared = file.declared
        headers = {
            "content-length": str(declared.size),
            "etag": f'"{declared.sha256}"',
            "content-disposition": f'attachment; filename="{declared.name}"',
            "x-content-type-options": "nosniff",
        }
        super().__init__(file.chunks(), headers=headers, media_type="application/octet-stream")
        self._file = file
        self._release_slot = release_slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A slow client is disconnected, and can tell from the declared length that the file is incomplete.
            with anyio.move_on_after(DOWNLOAD_TIMEOUT_S):
                await super().__call__(scope, receive, send)
        finally:
            self._file.close()
            self._release_slot()

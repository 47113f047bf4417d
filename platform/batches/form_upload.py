"""Receives the form of a file's upload, and writes the file to the disk as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from starlette.requests import ClientDisconnect, Request

from loramux.platform.batches.form_data import FormParser, Part
from loramux.platform.bodies.request_body import BODY_STALL_S, content_encoding
from loramux.platform.errors import InvalidRequest, PayloadTooLarge

UPLOAD_TIMEOUT_S = 1800.0
"""Timeout for receiving a whole file, in seconds."""
MAX_FIELD_BYTES = 1024
"""Longest value of an ordinary field, in bytes."""
MAX_FORM_BYTES = 1 << 20
"""Largest form apart from the file, in bytes."""
WRITTEN_AT_ONCE = 1 << 20
"""Number of bytes that are collected in memory before they are written."""


@dataclass(slots=True)
class UploadForm:
    """The file's part, and the other fields by name."""

    path: Path
    file_name: str | None = None
    fields: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def received_form(request: Request, scratch: Path, max_bytes: int) -> AsyncIterator[UploadForm]:
    """Receive a form whose field `file` is a file. The file exists until the context ends.

    Raises PayloadTooLarge as soon as the file is too large, UnsupportedEncoding for compressed bodies, or
    InvalidRequest.
    """
    content_encoding(request)
    too_large = PayloadTooLarge(f"a file must not exceed {max_bytes} bytes", param="file", code="file_too_large")
    declared = request.headers.get("content-length", "")
    # Count the digits first, so that a number with thousands of digits is not parsed.
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes + MAX_FORM_BYTES):
        raise too_large
    parser = FormParser(request.headers.get("content-type", ""))
    directory = await anyio.to_thread.run_sync(lambda: TemporaryDirectory(dir=scratch))
    try:
        form = UploadForm(Path(directory.name) / "file")
        await _receive(request, parser, _Receiver(form, max_bytes, too_large))
        yield form
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(directory.cleanup)


class _Receiver:
    """Sorts the parts of a form into the file and the fields."""

    def __init__(self, form: UploadForm, max_bytes: int, too_large: PayloadTooLarge) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._pending = bytearray()
        self._num_bytes = 0
        self._part: str | None = None
        self._values: dict[str, bytearray] = {}

    async def take(self, item: Part | bytes) -> None:
        if isinstance(item, Part):
            self._begin(item)
        elif self._part == "file":
            self._num_bytes += len(item)
            if self._num_bytes > self._max_bytes:
                raise self._too_large
            self._pending += item
            if len(self._pending) >= WRITTEN_AT_ONCE:
                await self._write()
        elif self._part is not None:
            value = self._values[self._part]
            value += item
            if len(value) > MAX_FIELD_BYTES:
                raise InvalidRequest("the value is too long", param=self._part[:100])

    async def end(self) -> None:
        if self._form.file_name is None:
            raise InvalidRequest("file is required", param="file", code="missing_required_parameter")
        await self._write()
        try:
            self._form.fields.update((name, value.decode()) for name, value in self._values.items())
        except UnicodeDecodeError:
            raise InvalidRequest("a field is not UTF-8", code="invalid_form") from None

    def _begin(self, part: Part) -> None:
        if part.name in self._values or (part.name == "file" and self._form.file_name is not None):
            raise InvalidRequest("the form has two fields of this name", param=part.name[:100])
        if (part.name == "file") != (part.file_name is not None):
            raise InvalidRequest("only the field 'file' is a file", param=part.name[:100])
        self._part = part.name
        if part.file_name is None:
            self._values[part.name] = bytearray()
        else:
            self._form.file_name = part.file_name

    async def _write(self) -> None:
        def append(data: bytes) -> None:
            with self._form.path.open("ab") as file:
                file.write(data)

        data = bytes(self._pending)
        self._pending.clear()
        await anyio.to_thread.run_sync(append, data)


async def _receive(request: Request, parser: FormParser, receiver: _Receiver) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(BODY_STALL_S) as limit:
            end_s = loop.time() + UPLOAD_TIMEOUT_S
            async for chunk in request.stream():
                for item in parser.feed(chunk):
                    await receiver.take(item)
                limit.reschedule(min(loop.time() + BODY_STALL_S, end_s))
    except TimeoutError:
        raise InvalidRequest(
            f"the body took more than {UPLOAD_TIMEOUT_S:g} s, or stalled for {BODY_STALL_S:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise InvalidRequest("the body ended early", code="incomplete_body") from None
    if not parser.is_complete:
        raise InvalidRequest("the form ends early", code="invalid_form")
    await receiver.end()

"""A parser of `multipart/form-data` bodies (RFC 7578) that never holds a whole part in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.errors import HeaderParseError, MessageError
from email.message import Message
from email.parser import HeaderParser

from loramux.platform.errors import InvalidRequest

MAX_BOUNDARY = 70
"""Longest boundary, in characters (RFC 2046, section 5.1.1)."""
MAX_CONTENT_TYPE = 300
"""Longest `Content-Type` of a form, in characters. The email package takes quadratic time for a header's parameters."""
MAX_HEADER_BYTES = 2048
"""Longest header of a part, in bytes."""
MAX_PARTS = 32


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part. `file_name` is None if the part is an ordinary field."""

    name: str
    file_name: str | None


class FormParser:
    """Parses a body that arrives in chunks. Create it with the request's `Content-Type`.

    Raises InvalidRequest if the type is not a form, or if the body is malformed.
    """

    def __init__(self, content_type: str) -> None:
        if len(content_type) > MAX_CONTENT_TYPE:
            raise InvalidRequest(f"the Content-Type exceeds {MAX_CONTENT_TYPE} characters", param="Content-Type")
        header = Message()
        header["content-type"] = content_type.encode("latin-1", "replace").decode("ascii", "replace")
        boundary = header.get_boundary("")
        if header.get_content_type() != "multipart/form-data":
            raise InvalidRequest("send a form: Content-Type: multipart/form-data", param="Content-Type")
        if not boundary or not boundary.isascii() or len(boundary) > MAX_BOUNDARY:
            raise InvalidRequest("the Content-Type has no valid boundary", param="Content-Type")
        self._delimiter = b"\r\n--" + boundary.encode()
        # The first delimiter has no line break before it.
        self._buffer = bytearray(b"\r\n")
        self._is_in_part = False
        self._num_parts = 0
        self.is_complete = False

    def feed(self, chunk: bytes) -> Iterator[Part | bytes]:
        """Yield the parts that begin in the chunk, and the bytes of the part that began last.

        Read the iterator to its end before the next call.
        """
        # What follows the form's end means nothing, and is not kept.
        if not self.is_complete:
            self._buffer += chunk
        while not self.is_complete:
            if self._is_in_part:
                end = self._buffer.find(self._delimiter)
                # The end of the buffer can be the beginning of a delimiter.
                kept = end if end >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
                if kept:
                    yield self._taken(kept)
                if end < 0:
                    return
                self._is_in_part = False
            part = self._next_part()
            if part is None:
                return
            yield part

    def _next_part(self) -> Part | None:
        """Read a delimiter with the header after it. Return None if more bytes are needed, or at the form's end."""
        start = len(self._delimiter)
        if len(self._buffer) < start + 2:
            return None
        if not self._buffer.startswith(self._delimiter):
            raise _malformed("a boundary was expected")
        if self._buffer[start : start + 2] == b"--":
            self.is_complete = True
            return None
        end = self._buffer.find(b"\r\n\r\n", start, start + MAX_HEADER_BYTES)
        if end < 0:
            if len(self._buffer) > start + MAX_HEADER_BYTES:
                raise _malformed("the header of a part is too long")
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        header = self._taken(end + 4)[start:]
        if not header.startswith(b"\r\n"):
            raise _malformed("a boundary is followed by other text")
        self._is_in_part = True
        return _part(header[2:])

    def _taken(self, num_bytes: int) -> bytes:
        with memoryview(self._buffer) as view:
            taken = bytes(view[:num_bytes])
        del self._buffer[:num_bytes]
        return taken


def _part(header: bytes) -> Part:
    try:
        fields = HeaderParser().parsestr(header.decode("utf-8", "replace"))
        name = fields.get_param("name", None, "content-disposition")
        file_name = fields.get_filename()
        kind = fields.get_content_disposition()
    except (MessageError, HeaderParseError, ValueError, LookupError, TypeError):
        raise _malformed("the header of a part cannot be read") from None
    if kind != "form-data" or not isinstance(name, str):
        raise _malformed("a part has no name")
    return Part(name, file_name)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a valid form: {reason}", code="invalid_form")

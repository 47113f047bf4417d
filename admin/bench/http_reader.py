"""The framing of one HTTP/1.1 response, read as it arrives.

A load generator shares its cores with the server that it measures. This reader takes a microsecond per read, a tenth of
what a complete HTTP library takes, and supports what a response to a POST request can have (RFC 9112, sections 4 and
6): interim responses, and bodies with a length, in chunks, or up to the end of the connection.
"""

from __future__ import annotations

import math

MAX_HEAD_BYTES = 64 << 10
MAX_SIZE_LINE_BYTES = 4 << 10
MAX_BODY_BYTES = 256 << 20


class BrokenResponse(Exception):
    """The server's bytes are not a response that can be read. The message gives the reason."""


class ResponseReader:
    def __init__(self) -> None:
        self.status = 0
        """0 until the head has been read."""
        self.is_done = False
        self.is_reusable = False
        """Whether the connection can carry another request after this response."""
        self._rest = b""
        self._is_chunked = False
        self._is_in_trailer = False
        self._is_after_chunk = False
        self._num_left = math.inf
        """Bytes that are left of the body or of the chunk."""
        self._num_body = 0

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`. Raises BrokenResponse."""
        self._rest += data
        if self.status == 0 and not self._read_head():
            return b""
        found = self._read_chunks() if self._is_chunked else self._read_plain()
        self._num_body += len(found)
        if self._num_body > MAX_BODY_BYTES:
            raise BrokenResponse(f"the response is larger than {MAX_BODY_BYTES >> 20} MiB")
        return found

    def end(self) -> None:
        """The server has closed the connection. Raises BrokenResponse if the response is incomplete."""
        if self.is_done:
            return
        if self.status == 0 or self._is_chunked or math.isfinite(self._num_left):
            raise BrokenResponse("the server closed the connection before the end of its response")
        self.is_done = True

    def _read_head(self) -> bool:
        while self.status == 0:
            head, found, rest = self._rest.partition(b"\r\n\r\n")
            if len(head) > MAX_HEAD_BYTES:
                raise BrokenResponse("the head of the response is too long")
            if not found:
                return False
            self._rest = rest
            first, *lines = head.split(b"\r\n")
            status = first[9:12]
            if not (first.startswith(b"HTTP/1.") and first[8:9] == b" " and status.isdigit()):
                raise BrokenResponse(f"the server does not speak HTTP/1.1: {first[:60]!r}")
            # An interim response, such as 100 Continue, is followed by another.
            if not status.startswith(b"1"):
                self.status = int(status)
                self._read_headers(first, lines)
        return True

    def _read_headers(self, first: bytes, lines: list[bytes]) -> None:
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().lower()
        self.is_reusable = first.startswith(b"HTTP/1.1") and headers.get(b"connection") != b"close"
        if b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"] != b"chunked":
                raise BrokenResponse("the response has an unknown transfer encoding")
            self._is_chunked, self._num_left = True, 0
        elif b"content-length" in headers:
            length = headers[b"content-length"]
            if not (length.isdigit() and len(length) < 16):
                raise BrokenResponse("the length of the response is not a number")
            self._num_left = int(length)
        elif self.status in (204, 304):
            self._num_left = 0
        else:
            self.is_reusable = False

    def _read_plain(self) -> bytes:
        if len(self._rest) > self._num_left:
            raise BrokenResponse("the response is longer than it says")
        found, self._rest = self._rest, b""
        self._num_left -= len(found)
        self.is_done = self._num_left == 0
        return found

    def _read_chunks(self) -> bytes:
        data, place, found = self._rest, 0, []
        while not self.is_done:
            if self._num_left:
                part = data[place : place + int(self._num_left)]
                if not part:
                    break
                found.append(part)
                place += len(part)
                self._num_left -= len(part)
                self._is_after_chunk = True
                continue
            end = data.find(b"\r\n", place)
            if end < 0:
                break
            line, place = data[place:end], end + 2
            if self._is_after_chunk:
                if line:
                    raise BrokenResponse("a chunk of the response is longer than it says")
                self._is_after_chunk = False
            elif self._is_in_trailer:
                self.is_done = not line
            else:
                self._num_left = _chunk_size(line)
                self._is_in_trailer = self._num_left == 0
        self._rest = data[place:]
        if len(self._rest) > MAX_SIZE_LINE_BYTES:
            raise BrokenResponse("the response has a malformed chunk")
        return found[0] if len(found) == 1 else b"".join(found)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        # int() would also accept signs and underscores.
        return int.from_bytes(bytes.fromhex(digits.decode("ascii").zfill(16)), "big")
    except (ValueError, UnicodeDecodeError):
        raise BrokenResponse(f"the response has a malformed chunk: {line[:40]!r}") from None

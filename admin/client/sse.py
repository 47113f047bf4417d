"""Server-sent events, as OpenAI APIs stream them."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
"""Longest line of a stream, in bytes."""


class StreamTooLong(Exception):
    """A line of a stream is longer than `MAX_EVENT_BYTES`."""


class EventReader:
    """Splits a stream's bytes into the data of its events. Comments and other fields are skipped.

    An event has one line of data, because JSON contains no line break. Only LF and CRLF end a line: JSON can contain
    other line separators of Unicode.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events whose lines end in `data`. Raises StreamTooLong."""
        return [value for name, value in self.feed_fields(data) if name == b"data"]

    def feed_fields(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the names and values of the fields whose lines end in `data`. An empty line, which ends an event, has
        an empty name, and so has a comment. Raises StreamTooLong.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamTooLong(f"the server sends a line of more than {MAX_EVENT_BYTES >> 20} MiB")
        fields = [line.partition(b":") for line in lines]
        return [(name.rstrip(b"\r"), value.strip()) for name, _, value in fields]

"""An h11 parser with limits on request heads that h11 itself does not have."""

from __future__ import annotations

import re

import h11
from h11 import _readers

MAX_HEAD_BYTES = 16 * 1024
"""Longest request head, in bytes. h11's own limit applies only to heads that are still incomplete after a read."""
_END_OF_HEAD = re.compile(rb"\n\r?\n")

# h11 tries every division of the spaces before a malformed value, or in a malformed chunk extension, between two
# patterns, in quadratic time: seconds for 16 KiB of them. A possessive quantifier does not give spaces back.
_readers.header_field_re = re.compile(_readers.header_field_re.pattern.replace(rb":[ \t]*", rb":[ \t]*+"))
_readers.chunk_header_re = re.compile(_readers.chunk_header_re.pattern.replace(rb";.*", rb";[^\r\n]*+"))


class BoundedParser(h11.Connection):
    """Parses a client's requests. `next_event` raises RemoteProtocolError if a head exceeds MAX_HEAD_BYTES."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.is_head_too_long = False
        """True once `next_event` has refused a head for its length."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE or self.their_state is h11.DONE:
            # Not `trailing_data`, which copies the buffer.
            buffer = self._receive_buffer
            if not buffer and not self._receive_buffer_closed:
                # uvicorn also asks after the end of each request and of each response. h11 takes many steps for this.
                return h11.NEED_DATA
            is_long = self.their_state is h11.IDLE and len(buffer) > MAX_HEAD_BYTES
            if is_long and _END_OF_HEAD.search(bytes(buffer), 0, MAX_HEAD_BYTES) is None:
                self.is_head_too_long = True
                raise h11.RemoteProtocolError("the request head is too long", error_status_hint=431)
        return super().next_event()

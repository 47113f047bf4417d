"""Follows a server's events, and continues where a broken connection left off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from loramux.admin.client.client import AdminClient, AdminError, Document, ServerUnreachable
from loramux.admin.client.retries import is_temporary
from loramux.admin.client.sse import EventReader, StreamTooLong

PAUSE_S = 2.0
"""Pause before a broken connection is opened again, in seconds."""


def follow(
    client: AdminClient,
    after: int | None,
    note_broken: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    **wanted: object,
) -> Iterator[Document]:
    """Yield events as they happen, without end. `after` is the number after which to begin, or None for the next event.

    Raises AdminError, or ServerUnreachable if the first connection fails. If a later one fails and the error is
    temporary, `note_broken` gets the reason, once until a connection succeeds.
    """
    has_begun, is_well = False, True
    while True:
        headers = {} if after is None else {"last-event-id": str(after)}
        try:
            with client.stream("events", headers, **wanted) as chunks:
                reader = NumberedReader()
                for chunk in chunks:
                    has_begun = is_well = True
                    for number, document in reader.feed(chunk):
                        after = after if number is None else number
                        if document is not None:
                            yield document
        except (AdminError, ServerUnreachable) as error:
            if not has_begun or not is_temporary(error):
                raise
            if is_well:
                note_broken(str(error))
            is_well = False
        pause(PAUSE_S)


class NumberedReader:
    """Splits a stream into events with their numbers. An event can lack either: a number alone says how far the server
    has read.

    Raises ServerUnreachable for what is not such a stream.
    """

    def __init__(self) -> None:
        self._reader = EventReader()
        self._number: int | None = None
        self._document: Document | None = None

    def feed(self, data: bytes) -> Iterator[tuple[int | None, Document | None]]:
        try:
            for name, value in self._reader.feed_fields(data):
                if name == b"id":
                    self._number = int(value)
                elif name == b"data":
                    self._document = json.loads(value)
                    if not isinstance(self._document, dict):
                        raise ValueError("an event is not an object")
                elif not name:
                    # An event counts only once it is complete.
                    yield self._number, self._document
                    self._number = self._document = None
        except (StreamTooLong, ValueError, RecursionError) as error:
            raise ServerUnreachable(f"the server sends a stream that is not one of events: {error}") from None

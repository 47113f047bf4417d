from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from loramux.admin.client.client import AdminClient, AdminError, ServerUnreachable
from loramux.admin.client.followed_events import follow


class Streams(AdminClient):
    """A client whose streams have these bytes or raise these errors, in turn."""

    def __init__(self, *streams: bytes | Exception) -> None:
        self._streams, self.begun_after = list(streams), list[str | None]()

    @contextmanager
    def stream(
        self, path: str, headers: Mapping[str, str] | None = None, **params: object
    ) -> Iterator[Iterator[bytes]]:
        self.begun_after.append((headers or {}).get("last-event-id"))
        stream = self._streams.pop(0)
        if isinstance(stream, Exception):
            raise stream
        yield iter([stream])


def refused(status: int) -> AdminError:
    return AdminError(status, f"the server returned {status}", None, None)


def event(number: int) -> bytes:
    return b'id: %d\nevent: x\ndata: {"n": %d}\n\n' % (number, number)


def followed(client: Streams, num_events: int) -> tuple[list[Any], list[str]]:
    broken: list[str] = []
    events = follow(client, None, broken.append, lambda seconds: None)
    return [next(events)["n"] for _ in range(num_events)], broken


def test_events_continue_after_a_rolling_restart() -> None:
    client = Streams(
        event(4), ServerUnreachable("it broke"), refused(503), refused(429), event(5), refused(502), event(6)
    )
    assert followed(client, 3) == ([4, 5, 6], ["it broke", "the server returned 502"])
    assert client.begun_after == [None, "4", "4", "4", "4", "5", "5"]


@pytest.mark.parametrize("streams", [(refused(503),), (event(4), refused(401))], ids=["at once", "a revoked key"])
def test_other_refusals_end_the_stream(streams: tuple[bytes | Exception, ...]) -> None:
    with pytest.raises(AdminError):
        followed(Streams(*streams), 2)

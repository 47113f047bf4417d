"""Streams wait for their tenants' events, with one question to the database for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from loramux.platform.events.event_feed import EventFeed

pytestmark = pytest.mark.anyio


class Positions:
    """The tenants of events, in the order of their positions."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.questions: asyncio.Queue[None] = asyncio.Queue()

    async def advance(self) -> int:
        self.questions.put_nowait(None)
        return len(self.tenants)

    async def changed(self, after: int) -> Collection[str]:
        return set(self.tenants[after:])


async def test_streams_wake_only_for_events_of_their_tenant() -> None:
    positions = Positions()
    feed = EventFeed(positions.advance, positions.changed, poll_s=0.001)
    assert await feed.head() == 0
    waiting = {name: asyncio.create_task(feed.wait(0, 60.0, name)) for name in ("acme", "globex")}
    of_all = asyncio.create_task(feed.wait(0, 60.0))
    await asyncio.sleep(0)
    positions.tenants.append("acme")
    assert await waiting["acme"] == 1
    assert await of_all == 1
    for _ in range(positions.questions.qsize() + 3):
        question = asyncio.create_task(positions.questions.get())
        await asyncio.wait({question, waiting["globex"]}, return_when=asyncio.FIRST_COMPLETED)
        assert not waiting["globex"].done()
    positions.tenants += ["acme", "globex"]
    assert await waiting["globex"] == 3


async def test_wait_without_an_event_ends() -> None:
    positions = Positions()
    feed = EventFeed(positions.advance, positions.changed, poll_s=0.001)
    positions.tenants.append("acme")
    assert await feed.head() == 1
    assert await feed.wait(1, 0.01, "acme") == 1
    # An event that was there before is not waited for.
    assert await feed.wait(0, 60.0, "acme") == 1


async def test_many_streams_ask_one_question() -> None:
    positions = Positions()
    feed = EventFeed(positions.advance, positions.changed, poll_s=0.001)
    assert await feed.head() == 0
    waiting = [asyncio.create_task(feed.wait(0, 60.0, f"ten_{number}")) for number in range(50)]
    await asyncio.sleep(0)
    positions.tenants += [f"ten_{number}" for number in range(50)]
    assert await asyncio.gather(*waiting) == [50] * 50
    assert positions.questions.qsize() == 2

"""The load counts what a server really answers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reliability import open_loop
from tests.reliability.open_loop import Answer, Counted, LoadSettings, Seen, _Load

pytestmark = pytest.mark.anyio

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def in_a_process(wanted: LoadSettings) -> Counted:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.reliability.open_loop"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate(json.dumps(asdict(wanted)).encode() + b"\n")
    return Counted(**json.loads(printed))


async def loaded(
    answers: list[bytes], run: Callable[[LoadSettings], Awaitable[Counted]] = in_a_process, **settings: Any
) -> tuple[Counted, Counter[str], int]:
    """Run a load on a server that gives the answers in turn, an empty one by closing the connection. Return what the
    load counted, the server's requests by key, and its number of connections.
    """
    keys: Counter[str] = Counter()
    serving: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ") for line in head.split("\r\n") if ": " in line)
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                assert body["stream"], body
                keys[fields["authorization"]] += 1
                answer = answers[keys.total() % len(answers)]
                if not answer:
                    break
                # The parts of an answer can arrive together or one by one.
                for part in (answer[:20], answer[20:]):
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wanted = LoadSettings(port=port, callers=[("a", ["m"]), ("b", ["m"])], seed=1, objective_s=5.0, **settings)
    counted = await run(wanted)
    server.close()
    await asyncio.gather(*serving)
    return counted, keys, len(serving)


async def test_answers_refusals_and_lost_connections_are_counted() -> None:
    whole = STREAM + chunk(b'data: {"text": "x"}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    broken = STREAM + chunk(b'data: {"error": "x"}\n\n') + b"0\r\n\r\n"
    counted, keys, _ = await loaded([whole, REFUSAL, broken, b""], seconds=0.5, rate=200.0)
    assert sum(counted.statuses.values()) == keys.total() > 40
    assert set(counted.statuses) == {"200", "503", "0"}
    fourth = keys.total() / 4
    assert counted.num_complete == pytest.approx(fourth, abs=1)
    assert 0 < counted.num_in_time <= counted.num_complete
    assert counted.num_refused == pytest.approx(fourth, abs=1)
    assert counted.window_s == pytest.approx(0.5)
    times = (counted.first_token_ms, counted.refusal_ms, counted.lateness_ms)
    assert [set(one) for one in times] == [{"p50", "p99", "max"}] * 3
    assert counted.refused_share == counted.num_refused / keys.total()
    assert keys["Bearer a"] > keys["Bearer b"] > 0, "the first tenant sends more"


async def test_clients_without_a_rate_send_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time passes only when the load looks at its clock, so a busy machine does not shorten the load.
    monkeypatch.setattr(open_loop, "time", SimpleNamespace(monotonic=partial(next, count(0.0, 0.001))))
    whole = STREAM + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    counted, keys, num_connections = await loaded(
        [whole, whole, b""], lambda wanted: _Load(wanted).run(), seconds=0.5, num_clients=3, skew=0.0
    )
    num_lost = counted.statuses["0"]
    assert counted.num_complete + num_lost == keys.total() > 6
    assert counted.lateness_ms == {}, "nothing is due"
    # A connection is used until it is lost.
    assert num_lost <= num_connections <= num_lost + 3


def test_goodput_counts_the_parts_of_answers_in_the_window() -> None:
    seen = Seen(objective_s=2.0, begin_s=10.0, end_s=20.0)
    for ended_s in (9.0, 11.0, 16.0, 24.0, 26.0):
        for first_token_s in (2.0, 2.1):
            seen.add(Answer(200, ended_s, 5.0, first_token_s, is_complete=True))
    seen.add(Answer(200, 15.0, 5.0, 1.0, is_complete=False))
    counted = seen.counted()
    assert (counted.num_complete, counted.window_s) == (10, 10.0)
    assert counted.num_in_time == pytest.approx(0.2 + 1 + 0.2)
    assert counted.goodput == counted.num_in_time / 10


@pytest.mark.parametrize("begin_s", [10.0, 11.0, 13.0, 14.9])
def test_goodput_does_not_depend_on_where_the_window_cuts_answers_that_end_together(begin_s: float) -> None:
    seen = Seen(objective_s=2.0, begin_s=begin_s, end_s=begin_s + 12.0)
    for ended_s in range(5, 40, 5):
        for _ in range(16):
            seen.add(Answer(200, ended_s, 5.0, 1.0, is_complete=True))
    assert seen.counted().goodput == pytest.approx(16 / 5)


def test_window_begins_after_the_warm_up() -> None:
    before_s = time.monotonic()
    seen = _Load(LoadSettings(port=1, callers=[], seconds=5.0, warm_s=2.0, seed=1, objective_s=1.0)).seen
    assert before_s + 2 <= seen.begin_s <= time.monotonic() + 2
    assert seen.end_s - seen.begin_s == pytest.approx(3.0)

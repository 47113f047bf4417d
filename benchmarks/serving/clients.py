"""Clients that stream completions from a server: a fixed number of open requests, or random arrivals.

Each request has its own connection. The clients keep what they receive, with the time of each read, and parse it only
after the load has ended, so that parsing delays no read.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from benchmarks.peers.system import SystemFailed

READ_BYTES = 1 << 16
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion request: the model's name, the prompt's token ids, and the number of tokens of its answer."""

    model: str
    prompt: tuple[int, ...]
    num_tokens: int

    def body(self, **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": self.prompt, "max_tokens": self.num_tokens}
        return body | {"temperature": 0.0, "ignore_eos": True} | more


@dataclass(slots=True)
class Received:
    """One answer: when it was due and sent, and its bytes with the times of the reads. Times are in seconds."""

    ask: Ask
    due_s: float
    data: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Observed:
    """The tokens of a load's answers. Times are in seconds on one clock."""

    first_tokens_s: list[float]
    """Times from when a request was due to its first token, for requests that were due in the window."""
    gaps_s: list[float]
    """Times between the chunks of an answer, for those requests."""
    tokens_s: float
    """Tokens per second that arrived in the window, from all requests."""
    num_prompt_tokens: int
    num_answer_tokens: int
    """Tokens of all requests, inside and outside the window."""
    num_requests: int


async def send(host: str, port: int, head: bytes, received: Received) -> None:
    """Send one request and receive its answer until the server closes the connection."""
    body = msgspec.json.encode(received.ask.body(stream=True, stream_options={"include_usage": True}))
    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
    try:
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        while data := await reader.read(READ_BYTES):
            received.times_s.append(time.perf_counter())
            received.data.append(data)
    finally:
        writer.close()


def closed_loop(
    address: tuple[str, int], api_key: str, asks: Iterator[Ask], num_open: int, warm_s: float, seconds: float
) -> Observed:
    """Keep `num_open` requests open, and observe a window of `seconds` that begins after `warm_s`."""

    async def run() -> tuple[list[Received], float]:
        started = time.perf_counter()
        answers: list[Received] = []

        async def client() -> None:
            while time.perf_counter() < started + warm_s + seconds:
                received = Received(next(asks), time.perf_counter())
                answers.append(received)
                await send(*address, _head(api_key), received)

        async with asyncio.timeout(warm_s + seconds + PATIENCE_S), asyncio.TaskGroup() as group:
            for _ in range(num_open):
                group.create_task(client())
        return answers, started + warm_s

    answers, begin_s = uvloop.run(run())
    return observe(answers, begin_s, begin_s + seconds)


def open_loop(
    address: tuple[str, int], api_key: str, due: Sequence[tuple[float, Ask]], warm_s: float, seconds: float
) -> Observed:
    """Send each request at its time in seconds, whatever is still open, and observe as in `closed_loop`."""

    async def run() -> tuple[list[Received], float]:
        started = time.perf_counter()
        answers = [Received(ask, started + at_s) for at_s, ask in due]
        async with asyncio.timeout(warm_s + seconds + PATIENCE_S), asyncio.TaskGroup() as group:
            for received in answers:
                await asyncio.sleep(received.due_s - time.perf_counter())
                group.create_task(send(*address, _head(api_key), received))
        return answers, started + warm_s

    answers, begin_s = uvloop.run(run())
    return observe(answers, begin_s, begin_s + seconds)


def _head(api_key: str) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: loopback", "connection: close", "content-type: application/json")
    return "\r\n".join((*lines, f"authorization: Bearer {api_key}", "")).encode()


def observe(answers: Iterable[Received], begin_s: float, end_s: float) -> Observed:
    """Parse the answers. Raises SystemFailed if one failed or does not have the requested number of tokens."""
    first_tokens, gaps = [], []
    num_in_window = 0.0
    num_prompt = num_answer = num_requests = 0
    for received in answers:
        times, usage = _parse(received)
        num_requests += 1
        num_prompt += usage["prompt_tokens"]
        num_answer += usage["completion_tokens"]
        num_inside = sum(begin_s <= at_s < end_s for at_s in times)
        # A chunk can carry several tokens, so count each chunk as an equal part of the answer.
        num_in_window += usage["completion_tokens"] * num_inside / len(times)
        if begin_s <= received.due_s < end_s:
            first_tokens.append(times[0] - received.due_s)
            gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    tokens_s = num_in_window / (end_s - begin_s)
    return Observed(first_tokens, gaps, tokens_s, num_prompt, num_answer, num_requests)


def _parse(received: Received) -> tuple[list[float], dict[str, int]]:
    """Return the times of the chunks that carry tokens, and the usage."""
    whole = b"".join(received.data)
    if not whole.startswith(b"HTTP/1.1 200"):
        raise SystemFailed(f"{received.ask.model} answers {whole[:500].decode(errors='replace')}")
    ends, total = [], 0
    for data in received.data:
        total += len(data)
        ends.append(total)
    times: list[float] = []
    usage: dict[str, int] = {}
    start = whole.find(b"data: ")
    while start >= 0:
        end = whole.find(b"\n\n", start)
        if end < 0:
            break
        line = whole[start + 6 : end]
        if line.startswith(b"{"):
            document = msgspec.json.decode(line)
            if "error" in document:
                raise SystemFailed(f"{received.ask.model} ended a stream: {line[:500].decode(errors='replace')}")
            if any(choice["text"] for choice in document["choices"]):
                times.append(received.times_s[bisect.bisect_left(ends, end)])
            usage = document.get("usage") or usage
        start = whole.find(b"data: ", end)
    if usage.get("completion_tokens") != received.ask.num_tokens or not times:
        raise SystemFailed(f"{received.ask.model} answered {usage} instead of {received.ask.num_tokens} tokens")
    return times, usage


def arrivals(
    asks: Iterator[Ask], requests_s: float, seconds: float, uniform: Callable[[], float]
) -> list[tuple[float, Ask]]:
    """Poisson arrivals at this rate. `uniform` draws from [0, 1)."""
    due, at_s = [], 0.0
    while (at_s := at_s - math.log(1.0 - uniform()) / requests_s) < seconds:
        due.append((at_s, next(asks)))
    return due

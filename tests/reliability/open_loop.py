"""Sends requests of many tenants, at a rate or one after another: `python -m tests.reliability.open_loop`.

The load runs in its own process, which reads its settings from standard input as one line of JSON, and prints what it
has counted as one line of JSON. It keeps connections open and reads of each answer only what it counts. A request is
never repeated. The load shares the server's processors, so it builds a request from parts and counts how late it sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import cast

import numpy as np
import uvloop

MAX_IDLE_S = 30.0
"""A connection that has been idle for longer is not used again, in seconds. The server closes it after 75 s."""

RETRY_S = 1.0
"""How long one of a number of clients waits after a refusal, in seconds."""

REFUSALS = (429, 503)
NUM_PROMPT_TOKENS = 48
TOKENS = [str(token) for token in range(3, 500)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    port: int
    callers: list[tuple[str, list[str]]]
    """The key of each tenant and the models that it calls."""
    skew: float = 0.5
    """The tenant with index `i` sends in proportion to `(1 + i) ** -skew`."""
    service_tiers: list[str] = field(default_factory=lambda: ["auto"])
    """Each request asks for one of them, at random."""
    seconds: float
    warm_s: float = 0.0
    """The goodput counts what is answered between this time and `seconds`. If it counted all answers to the requests
    that are sent, a short load would seem to have more of it.
    """
    seed: int
    objective_s: float
    """A first token within this time counts as in time."""
    rate: float | None = None
    """Requests per second, as a Poisson process. None: each of `num_clients` sends its next request after an answer, or
    RETRY_S after a refusal.
    """
    num_clients: int = 1
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Counted:
    """What the requests of a load led to. Times are in milliseconds, from sending a request."""

    statuses: dict[str, int]
    """Number of answers by status. 0 stands for a connection that was lost."""
    num_complete: int
    """Streams that ended with `[DONE]`."""
    num_in_time: float
    """Complete streams whose first token came in time. Of each, the part of its time that lies in the window counts.
    Otherwise, the number would depend on where the window cuts, because answers of many clients can end together.
    """
    window_s: float
    """Length of the window in which answers count for the goodput, in seconds."""
    first_token_ms: dict[str, float]
    """Quantiles of the time to the first token: p50, p99 and max."""
    refusal_ms: dict[str, float]
    """Quantiles of the time until a refusal with 429 or 503 had arrived."""
    lateness_ms: dict[str, float]
    """Quantiles of the time from when a request was due until it was sent. Empty without a rate."""

    @property
    def goodput(self) -> float:
        """Answers in time per second."""
        return self.num_in_time / self.window_s

    @property
    def refused_share(self) -> float:
        return self.num_refused / max(1, sum(self.statuses.values()))

    @property
    def num_refused(self) -> int:
        return sum(self.statuses.get(str(status), 0) for status in REFUSALS)


@dataclass(slots=True)
class Seen:
    """Counts answers. The window of the goodput is `[begin_s, end_s)`, on the clock of `Answer.ended_s`."""

    objective_s: float
    begin_s: float
    end_s: float
    statuses: Counter[str] = field(default_factory=Counter)
    num_complete: int = 0
    num_in_time: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        self.statuses[str(answer.status)] += 1
        if answer.first_token_s is not None:
            self.first_token_s.append(answer.first_token_s)
        if answer.status in REFUSALS:
            self.refusal_s.append(answer.seconds)
        if answer.is_complete and answer.first_token_s is not None:
            self.num_complete += 1
            if answer.first_token_s <= self.objective_s:
                inside_s = min(answer.ended_s, self.end_s) - max(answer.ended_s - answer.seconds, self.begin_s)
                self.num_in_time += max(0.0, inside_s) / answer.seconds

    def counted(self) -> Counted:
        times = [_quantiles_ms(one) for one in (self.first_token_s, self.refusal_s, self.lateness_s)]
        return Counted(dict(self.statuses), self.num_complete, self.num_in_time, self.end_s - self.begin_s, *times)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    ended_s: float
    seconds: float
    """Time from sending the request until the end of the answer."""
    first_token_s: float | None
    is_complete: bool


class _Connection(asyncio.Protocol):
    """One HTTP connection, which sends one request at a time."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of this class, but are not instances of it.
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._began_s, self._first_token_s = time.monotonic(), None
        self._head, self._tail, self._length = b"", b"", 0
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._end(0, False)

    def data_received(self, data: bytes) -> None:
        if not self._tail:
            self._head += data
            head, separator, body = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._head, data = head, body
        self._length += len(data)
        # Empty until the head is complete, so a byte stands for the head.
        self._tail = ((self._tail or b" ") + data)[-64:]
        status = int(self._head[9:12])
        if status != 200:
            if self._length >= _content_length(self._head):
                self._end(status, False)
            return
        if self._first_token_s is None and self._length:
            self._first_token_s = time.monotonic() - self._began_s
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end(status, b"data: [DONE]" in self._tail)

    def _end(self, status: int, is_complete: bool) -> None:
        if self._answer is not None and not self._answer.done():
            now_s = time.monotonic()
            self._answer.set_result(Answer(status, now_s, now_s - self._began_s, self._first_token_s, is_complete))
        self._answer = None


def _content_length(head: bytes) -> int:
    _, _, after = head.lower().partition(b"\r\ncontent-length: ")
    return int(after.partition(b"\r\n")[0] or 0)


class _Load:
    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._dice = random.Random(settings.seed)
        self._weights = [*accumulate((1 + index) ** -settings.skew for index in range(len(settings.callers)))]
        self._idle: list[_Connection] = []
        began_s = time.monotonic()
        self._end_s = began_s + settings.seconds
        self.seen = Seen(settings.objective_s, began_s + settings.warm_s, self._end_s)

    async def run(self) -> Counted:
        """Send for the given time, and wait for the answers to all requests."""
        settings = self._settings
        if settings.rate is None:
            await asyncio.gather(*(self._one_after_another() for _ in range(settings.num_clients)))
        else:
            under_way: set[asyncio.Task[Answer]] = set()
            next_s = time.monotonic()
            while (next_s := next_s + self._dice.expovariate(settings.rate)) < self._end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                self.seen.lateness_s.append(max(0.0, time.monotonic() - next_s))
                # Drawn here, so that the order of the draws does not depend on how long connecting takes.
                task = asyncio.create_task(self._ask(self._request()))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            await asyncio.gather(*under_way)
        for connection in self._idle:
            connection.close()
        return self.seen.counted()

    async def _one_after_another(self) -> None:
        while time.monotonic() < self._end_s:
            if (await self._ask(self._request())).status in REFUSALS:
                await asyncio.sleep(RETRY_S)

    async def _ask(self, request: bytes) -> Answer:
        connection = await self._connection()
        answer = await connection.ask(request)
        self.seen.add(answer)
        if not connection.is_lost:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost and time.monotonic() - connection.idle_since_s < MAX_IDLE_S:
                return connection
            connection.close()
        _, made = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", self._settings.port)
        return made

    def _request(self) -> bytes:
        """A completion of a random prompt, which no prefix cache has."""
        dice = self._dice
        [(key, models)] = dice.choices(self._settings.callers, cum_weights=self._weights)
        body = (
            f'{{"model":"{dice.choice(models)}","prompt":[{",".join(dice.choices(TOKENS, k=NUM_PROMPT_TOKENS))}],'
            f'"max_tokens":{self._settings.max_tokens},"ignore_eos":true,"stream":true,'
            f'"service_tier":"{dice.choice(self._settings.service_tiers)}"}}'
        )
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()


def _quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99, most = np.quantile(seconds, (0.5, 0.99, 1.0)) * 1e3
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(most), 2)}


def main() -> None:
    settings = LoadSettings(**json.loads(sys.stdin.readline()))
    print(json.dumps(asdict(uvloop.run(_Load(settings).run()))))


if __name__ == "__main__":
    main()

"""A proxy in front of PostgreSQL that breaks connections and queries."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict


class Fault(Enum):
    """What happens to a new connection, or to the bytes that a client sends at once, which are a query or several.

    With a `LOST` fault, the server executes them, but its answer does not arrive.
    """

    REFUSE = "new connection reset"
    SILENCE = "new connection without an answer"
    RESET = "reset before the query"
    RESET_MIDWAY = "reset in the middle of the query"
    RESET_AT_ONCE = "reset as soon as the server has the query"
    HANG = "no answer, and no query for the server"
    SHUTDOWN = "FATAL 57P01, as from a server that shuts down"
    LOST_RESET = "reset after the answer"
    LOST_COMMIT = "reset after the answer to a COMMIT"
    LOST_HANG = "no answer"
    TRUNCATE = "half of the answer"
    DRIP = "answer in small pieces, late"


AT_CONNECT = (Fault.REFUSE, Fault.SILENCE)
IN_QUERIES = tuple(fault for fault in Fault if fault not in AT_CONNECT)

Plan = Callable[[Sequence[Fault]], Fault | None]
"""Chooses one of the faults that are possible now, or None."""


def no_faults(possible: Sequence[Fault]) -> Fault | None:
    return None


class SeededPlan:
    """Injects a fault in a part `rate` of the cases: the possible one that was injected the fewest times."""

    def __init__(self, seed: int, rate: float) -> None:
        self._dice = random.Random(seed)
        self._rate = rate
        self._num_injected: Counter[Fault] = Counter()

    def __call__(self, possible: Sequence[Fault]) -> Fault | None:
        if self._dice.random() >= self._rate:
            return None
        fault = min(possible, key=lambda one: (self._num_injected[one], self._dice.random()))
        self._num_injected[fault] += 1
        return fault


class PostgresProxy:
    """Listens on loopback from construction until `close`. `plan` can be changed at any time.

    `upstream` is the URL of a database. `url` is the same one through the proxy.
    """

    def __init__(self, upstream: str, plan: Plan = no_faults, hang_s: float = 8.0, drip_s: float = 0.2) -> None:
        parameters = conninfo_to_dict(upstream)
        self._host, self._port = str(parameters.get("host", "")), int(parameters.get("port") or 5432)
        self.plan = plan
        self.hang_s = hang_s
        self.drip_s = drip_s
        self.num_injected: Counter[Fault] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        user, name = quote(str(parameters.get("user", ""))), parameters["dbname"]
        # Without TLS, so that queries can be recognised.
        self.url = (
            f"postgresql://{user}@127.0.0.1:{self._listener.getsockname()[1]}/{name}?sslmode=disable&gssencmode=disable"
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def choose(self, possible: Sequence[Fault]) -> Fault | None:
        fault = self.plan(possible)
        if fault is not None:
            self.num_injected[fault] += 1
        return fault

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._host.startswith("/"):
            return await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        return await asyncio.open_connection(self._host, self._port)

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listener))
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_end_tasks())
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self.choose(AT_CONNECT)
        if fault is Fault.SILENCE:
            await asyncio.sleep(self.hang_s)
        if fault is not None:
            _reset(writer)
            return
        # A server that is down refuses the connection.
        try:
            server = await self.connect()
        except OSError:
            _reset(writer)
            return
        await _Link(self, (reader, writer), server).run()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Transports close in the next turns of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Broken(Exception):
    """The connection ends here."""


class _Link:
    """One client's connection and the proxy's connection to the server."""

    def __init__(self, proxy: PostgresProxy, client: Stream, server: Stream) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._is_ready = False
        self._fault: Fault | None = None
        """What happens to the next answer."""

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._relay_queries())
                group.create_task(self._relay_answers())
        except* (_Broken, OSError):
            pass
        finally:
            _reset(self._to_client)
            _reset(self._to_server)

    async def _relay_queries(self) -> None:
        while data := await self._from_client.read(1 << 20):
            # Nothing is broken before the client has signed in, which only REFUSE and SILENCE are about.
            fault = self._proxy.choose(_possible(data)) if self._is_ready and self._fault is None else None
            await self._send(data, fault)
        raise _Broken

    async def _send(self, data: bytes, fault: Fault | None) -> None:
        match fault:
            case Fault.RESET:
                raise _Broken
            case Fault.HANG:
                await asyncio.sleep(self._proxy.hang_s)
                raise _Broken
            case Fault.SHUTDOWN:
                self._to_client.write(_SHUTDOWN)
                await self._to_client.drain()
                self._to_client.close()
                raise _Broken
            case Fault.RESET_MIDWAY | Fault.RESET_AT_ONCE:
                self._to_server.write(data[: len(data) // 2] if fault is Fault.RESET_MIDWAY else data)
                await self._to_server.drain()
                # An orderly end, so that the server reads what it was sent.
                self._to_server.close()
                raise _Broken
            case _:
                self._fault = fault
                self._to_server.write(data)
                await self._to_server.drain()

    async def _relay_answers(self) -> None:
        while data := await self._from_server.read(1 << 20):
            # The last message of an answer: ReadyForQuery.
            self._is_ready = self._is_ready or data[-6:-1] == b"Z\0\0\0\5"
            fault, self._fault = self._fault, None
            match fault:
                case Fault.LOST_RESET | Fault.LOST_COMMIT:
                    raise _Broken
                case Fault.LOST_HANG:
                    await asyncio.sleep(self._proxy.hang_s)
                    raise _Broken
                case Fault.TRUNCATE:
                    self._to_client.write(data[: len(data) // 2])
                    await self._to_client.drain()
                    self._to_client.close()
                    raise _Broken
                case Fault.DRIP:
                    size = max(1, len(data) // 4)
                    for begin in range(0, len(data), size):
                        await asyncio.sleep(self._proxy.drip_s)
                        self._to_client.write(data[begin : begin + size])
                case _:
                    self._to_client.write(data)
            await self._to_client.drain()
        raise _Broken


def _possible(data: bytes) -> Sequence[Fault]:
    return IN_QUERIES if b"COMMIT" in data else tuple(one for one in IN_QUERIES if one is not Fault.LOST_COMMIT)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST, unless it is closing already."""
    if writer.is_closing():
        return
    with contextlib.suppress(OSError):
        own = writer.get_extra_info("socket")
        if own.family == socket.AF_INET:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


_SHUTDOWN = _message(b"E", b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0")
"""The message with which PostgreSQL ends connections when it shuts down: section 55.8 of its documentation."""

